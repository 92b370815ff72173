"""Base class for a trainer actor, which owns one rank of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from weightsync.actors.claim import Claimable
from weightsync.actors.placement import Placement
from weightsync.actors.readiness import Readiness
from weightsync.channel.control import ControlOffer, Turns, answer_calls, fits
from weightsync.channel.notices import Notices
from weightsync.errors import ConfigError, StateError
from weightsync.faults import Fault, inject, set_faults
from weightsync.memory.fingerprints import publish_report
from weightsync.plan import Plan
from weightsync.plan.layout_table import LayoutTable, Outline
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.handles import BufferHandle, DeviceHandle, PushTicket
from weightsync.protocol.messages import AttachReport, Digests, PublishReport
from weightsync.protocol.timing import PhaseClock
from weightsync.sources import (
    ExportsWeights,
    Models,
    ModelSource,
    Names,
    Offloads,
    PushesWeights,
    Source,
    attach,
    make_components,
    make_source,
)

if TYPE_CHECKING:
    from weightsync.actors.adapter_shard import AdapterShard


class TrainerShard(Claimable):
    """Base class of a trainer actor. Set ``self.model``, a module or what a training library made of it::

        class Trainer(TrainerShard):
            def __init__(self, ...):
                self.model = build()

        trainer = ray.remote(Trainer).remote(...)

    Each update takes what ``self.model`` holds at that moment. You may replace the model or its parameters if
    names, shapes, dtypes and sharding stay the same. If they do not, the update raises a StateError that
    names the rank and the tensor, and `WeightSync.connect` has to come first.

    The model is an ``nn.Module``, plain or wrapped by FSDP2, the engine of ``deepspeed.initialize``, or
    Megatron-Core's with ``self.hf_config`` set to the checkpoint's configuration. See docs/trainers.md.

    If the weights are not in such a model, set ``self.source`` instead, a `Source` of your own.

    A rank that trains the draft with which engines speculate sets ``self.draft`` to such a model, beside
    ``self.model`` or alone. MTP layers may also be in ``self.model``. See docs/components.md.

    WeightSync calls methods named ``sync_…`` between your own. Wait for your own calls with `ray.get` before
    `WeightSync.update_weights`: weights have to be final when it begins. Where trainers are on more than 8
    hosts, a process on each host calls them to publish, and Ray keeps only the calls of one process in order.
    Where GPU memory is read in place, a thread of the actor publishes without such a call, unless one runs.

    Call ``super().__init__`` only to pass one of these arguments.

    Args:
        slot: on a CPU host, a name; the engine with the same slot shares its holder.
        exclude: patterns of tensors that no engine wants, such as ``value_head.*``, as of `fnmatch`.
        names: how the model's names become a checkpoint's, which engines take: a mapping from prefix to
            prefix, such as ``{"base_model.model.": ""}``, or a function of one name. `exclude` comes after.
        frozen: patterns of tensors that do not change, such as ``visual.*``: they travel with the first
            update, and after it their digests are compared alone. An update raises StateError if one changed.
            In `exclude`, `names` and `frozen`, what begins with ``draft/`` is of the draft.
        offloads: True if the trainer shares its GPU with an engine and calls `offload`. Weights then travel
            through host memory.
        quantization: the ``quantization_config`` of the engines, to quantise linear layers here: fewer bytes
            travel. All engines must be quantised alike, and each rank must hold whole blocks. See
            docs/quantised.md.
        merge: a LoRA adapter of ``self.model`` by PEFT's name, such as ``default``. Each version then has it
            merged, for engines without adapter slots. See docs/adapters.md.
    """

    model: Any
    draft: Any = None
    hf_config: Any = None
    source: Source | None = None
    _slot: str | None = None
    _exclude: Collection[str] = ()
    _names: Names | None = None
    _frozen: Collection[str] = ()
    _offloads: bool = False
    _quantization: Mapping[str, Any] | None = None
    _merge: str = ""
    _made: ModelSource | None = None
    _models: Models = (None, None)
    _attached: Source | None = None
    _described: LayoutTable | None = None
    _attached_plan: Plan | None = None
    _digests: Digests | None = None
    _notices: Notices | None = None
    _readiness: Readiness | None = None
    _gpu: int | None = None
    _parts: Mapping[str, AdapterShard] = MappingProxyType({})

    def __init__(
        self,
        slot: str | None = None,
        exclude: Collection[str] = (),
        offloads: bool = False,
        names: Names | None = None,
        frozen: Collection[str] = (),
        quantization: Mapping[str, Any] | None = None,
        merge: str = "",
    ) -> None:
        self._slot, self._exclude, self._offloads, self._names = slot, exclude, offloads, names
        self._frozen, self._quantization, self._merge = frozen, quantization, merge

    def offload(self) -> None:
        """Release the GPU memory of all parameters and persistent buffers of ``self.model``.

        Their values move to host memory, from which the next update sends them without another copy.
        Gradients and the optimizer's state stay; move them yourself. The model cannot be used until `onload`.

        Call it while no update runs, and after `WeightSync.sleep` or `WeightSync.settle`. Before that,
        holders may still read the host memory that it writes.

        Raises:
            StateError: ``offloads=True`` was not given, torch does not own the memory, or ``self.source``
                cannot offload. Nothing was done.
        """
        source = self._current_source()
        if not isinstance(source, Offloads):
            raise StateError(f"{type(source).__name__} cannot offload: it has no such method")
        source.offload()

    def onload(self) -> None:
        """Allocate the memory again and restore the values. Call it again after an out-of-memory error."""
        source = self.source or self._made
        if isinstance(source, Offloads):
            source.onload()

    def sync_placement(self) -> Placement:
        """Return where this rank runs."""
        return Placement.here(self._slot)

    def sync_placement_so_far(self) -> Placement | None:
        """Return where this rank runs, None before it has chosen its GPU."""
        return Placement.so_far(self._slot)

    def sync_outline(self) -> Outline:
        """Return an outline of `sync_layout`, which is then asked of one of the ranks with equal ones."""
        self._described = self._describe()
        return self._described.outline()

    def sync_layout(self) -> LayoutTable:
        """Return the boxes of tensors that this rank holds, as it outlined them just now if it did."""
        described, self._described = self._described, None
        return described or self._describe()

    def _describe(self) -> LayoutTable:
        source = self._current_source()
        source.close()
        return LayoutTable.of(source.layout())

    def sync_trial_handle(self) -> DeviceHandle | None:
        """Return a handle that holders may try to map, see `ExportsWeights`."""
        source = self._current_source()
        return source.trial_handle() if isinstance(source, ExportsWeights) else None

    def sync_can_push(self) -> bool:
        """Return whether this rank can push weights from host memory to its holder's GPU."""
        source = self._current_source()
        return self._slot is None and isinstance(source, PushesWeights) and source.can_push()

    def sync_attach(
        self, plan: Plan, trainer: int, send_buffer: BufferHandle | PushTicket | None
    ) -> AttachReport:
        """Map the holder's send buffer, let it read this rank's memory in place, or push to it."""
        self._attached, self._described = self._current_source(), None
        self._attached_plan = plan
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return AttachReport.of(attach(self._attached, plan, trainer, send_buffer))

    def sync_dial(self, offer: ControlOffer, asks: ControlOffer | None = None) -> None:
        """Prepare to tell the driver when holders may read this rank's weights.

        With an offer for what it `asks`, also answer that, before or in place of `publish`.
        """
        if self._notices:
            self._notices.close()
        self._notices = Notices(offer)
        readiness = self._readiness = Readiness(self._ready)
        is_newest = self._turns.begin()
        if asks:
            on_daemon(partial(self._answer, asks, readiness, is_newest), "weightsync-publish")

    def _answer(self, asks: ControlOffer, readiness: Readiness, is_newest: Callable[[], bool]) -> None:
        """Answer what comes before Ray's call, on a thread where the actor's GPU is the current one."""

        def readable(ticket: int) -> bool:
            with self._on_its_gpu():
                return readiness.early(ticket)

        def publish_in_place(count: bool, ticket: int) -> PublishReport | None:
            with self._on_its_gpu():
                report = readiness.once(ticket, partial(self._publish, count, ticket))
            return report if fits(report) else None

        answer_calls(asks, {"readable": readable, "publish_in_place": publish_in_place}, is_newest)

    def _on_its_gpu(self) -> AbstractContextManager[object]:
        return nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)

    @cached_property
    def _turns(self) -> Turns:
        return Turns()

    def sync_publish(self, count: bool, ticket: int = 0, tells: bool = False) -> PublishReport:
        """Publish this rank's share: copy it to its holder, or on a GPU in place.

        In place, tell the driver once holders may read it, then digest it. Without a `ticket`, tell nobody.
        If it `tells`, the driver gets the report on the socket of notices, too.
        """
        publish = partial(self._publish, count, ticket)
        report = self._readiness.once(ticket, publish) if self._readiness else publish()
        if tells and self._notices:
            self._notices.published(ticket, report)
        return report

    def _publish(self, count: bool, ticket: int) -> PublishReport:
        clock = PhaseClock()
        with clock.phase("publish"):
            source = self._attached_source()
            readable = self._readiness.now(ticket) if self._readiness else self._ready()
            if readable and ticket and self._notices:
                self._notices.readable(ticket)
            inject("publish")
            published = source.publish(count)
        assert self._attached_plan is not None
        self._digests = published.digests
        return publish_report(published, self._attached_plan.frozen, clock.spans)

    def _ready(self) -> bool:
        source = self._attached_source()
        return isinstance(source, ExportsWeights) and source.ready()

    def sync_digests(self) -> Digests:
        """Return the digests that this rank published last, uint64[num_tensors]."""
        if self._digests is None:
            raise StateError("nothing was published yet")
        return self._digests

    def sync_open_adapter(self, name: str, adapter: str) -> AdapterSpec:
        """Prepare to publish PEFT's `adapter` of ``self.model`` by `sync_adapter`. Returns what it is.

        Engines call it `name`. Raises ConfigError if there is none, or if engines could not serve it.
        """
        from weightsync.actors.adapter_shard import AdapterShard

        if not hasattr(self, "model"):
            raise StateError(f"{type(self).__name__} has to set self.model before its adapter is registered")
        shard = AdapterShard(self, adapter)
        spec = shard.adapter.spec(name)
        self._parts = {**self._parts, name: shard}
        return spec

    def sync_cast_adapter(self, name: str, dtype: str) -> None:
        """Publish an adapter in `dtype`, that of the engines' slots, from the next connect on."""
        self._parts[name].adapter.cast(dtype)

    def sync_close_adapter(self, name: str) -> None:
        """Forget an adapter. Safe to call twice."""
        if part := self._parts.get(name):
            part.adapter.close()
        self._parts = {other: part for other, part in self._parts.items() if other != name}

    def sync_adapter(self, spec: AdapterSpec, method: str, *args: Any) -> Any:  # noqa: ANN401
        """Call a ``sync_…`` method of one adapter, which has its own plan, holder and version."""
        part = self._parts.get(spec.name)
        if part is None:
            raise StateError(f"this process does not know adapter {spec.name}: register it again")
        return getattr(part, method)(*args)

    def _attached_source(self) -> Source:
        source = self._current_source()
        if source is not self._attached:
            raise StateError("self.source was replaced after connect(): call connect() again")
        return source

    def _current_source(self) -> Source:
        if self.source is not None:
            for name, given in (
                ("exclude", self._exclude),
                ("names", self._names),
                ("frozen", self._frozen),
                ("offloads", self._offloads),
                ("quantization", self._quantization),
                ("merge", self._merge),
                ("self.draft", self.draft is not None),
            ):
                if given:
                    raise ConfigError(name, given, "leave it out: self.source decides")
            return self.source
        models = getattr(self, "model", None), self.draft
        if _kinds(models) == (True, True):
            raise StateError(f"{type(self).__name__} has to set self.model or self.source before it is used")
        if self._made is None or _kinds(models) != _kinds(self._models):
            make: Callable[..., ModelSource] = make_source if self.draft is None else make_components
            self._models = models
            self._made = make(
                self.model if self.draft is None else models,
                self._exclude,
                names=self._names,
                frozen=self._frozen,
                offloads=self._offloads,
                hf_config=self.hf_config,
                quantization=self._quantization,
                merge=self._merge,
            )
        if not all(map(is_, models, self._models)):
            self._models = models
            self._made.replace(self.model if self.draft is None else models)
        return self._made

    def sync_set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults of this process, see `weightsync.faults.set_faults`."""
        set_faults(process, faults, seed)


def _kinds(models: Models) -> tuple[bool, bool]:
    """Return whether the model, and the draft, are missing."""
    model, draft = models
    return model is None, draft is None
