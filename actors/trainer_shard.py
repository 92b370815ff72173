"""Base class for a trainer actor, which owns one rank of a model, and of the model's adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

from weightsync.actors.shard import Shard
from weightsync.errors import ConfigError, StateError
from weightsync.protocol.adapters import AdapterSpec
from weightsync.sources import Models, ModelSource, Names, Offloads, Source, make_components, make_source
from weightsync.sources.lora.lora import LoraSource


class TrainerShard(Shard):
    """Base class of a trainer actor. Set ``self.model``, a module or what a training library made of it::

        class Trainer(TrainerShard):
            def __init__(self, ...):
                self.model = build()

        trainer = ray.remote(Trainer).remote(...)

    Each update moves the weights of ``self.model`` at that moment. You may replace the model or its
    parameters if names, shapes, dtypes and sharding stay the same. If they do not, the update raises a
    StateError that names the rank and the tensor, and `WeightSync.connect` has to come first.

    The model is an ``nn.Module``, plain or wrapped by FSDP2, the engine of ``deepspeed.initialize``, or
    Megatron-Core's with ``self.hf_config`` set to the checkpoint's configuration. See docs/trainers.md.

    If the weights are not in such a model, set ``self.source`` instead, to your own `Source`.

    A rank that trains the draft with which engines speculate sets ``self.draft`` to such a model, with or
    without ``self.model``. MTP layers may also be in ``self.model``. See docs/drafts.md.

    WeightSync calls methods named ``sync_…`` between your own. Wait for your own calls with `ray.get` before
    `WeightSync.update_weights`: weights have to be final when it begins. If trainers are on more than 8
    hosts, a process on each host calls them to publish, and Ray only keeps the calls of one process in order.
    If GPU memory is read in place, a thread of the actor publishes without such a call, unless a call runs.

    Call ``super().__init__`` only to pass one of these arguments.

    Args:
        slot: on a CPU host, a name; the trainer shares a holder with the engine of the same slot.
        exclude: patterns of tensors that no engine wants, such as ``value_head.*``, as of `fnmatch`.
        names: how the model's names become the checkpoint's names that engines use: a mapping from prefix to
            prefix, such as ``{"policy.": ""}``, or a function of one name. `exclude` comes after. Names added
            by DDP, `torch.compile`, activation checkpoints and PEFT are removed automatically.
        frozen: patterns of tensors that do not change, such as ``visual.*``: they are sent with the first
            update, and later only their digests are compared. An update raises StateError if a frozen tensor
            changed. In `exclude`, `names` and `frozen`, names of the draft begin with ``draft/``.
        offloads: True if the trainer shares its GPU with an engine and calls `offload`. Weights are then
            copied through host memory.
        quantization: the ``quantization_config`` of the engines, to quantise linear layers here, so that
            fewer bytes are sent. All engines must be quantised alike, and each rank must have whole blocks.
            See docs/quantised.md.
        merge: a LoRA adapter of ``self.model`` by PEFT's name, such as ``default``. Each version then has it
            merged, for engines without adapter slots. See docs/adapters.md.
    """

    model: Any
    draft: Any = None
    hf_config: Any = None
    source: Source | None = None
    _exclude: Collection[str] = ()
    _names: Names | None = None
    _frozen: Collection[str] = ()
    _offloads: bool = False
    _quantization: Mapping[str, Any] | None = None
    _merge: str = ""
    _made: ModelSource | None = None
    _models: Models = (None, None)
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

    def sync_open_adapter(self, name: str, adapter: str) -> AdapterSpec:
        """Prepare to publish PEFT's `adapter` of ``self.model`` by `sync_adapter`. Returns the adapter's
        spec.

        Engines call the adapter `name`. Raises ConfigError if there is no such adapter, or if engines could
        not serve it.
        """
        if not hasattr(self, "model"):
            raise StateError(f"{type(self).__name__} has to set self.model before its adapter is registered")
        shard = AdapterShard(self, adapter)
        spec = shard.adapter.spec(name)
        self._parts = {**self._parts, name: shard}
        return spec

    def sync_cast_adapter(self, name: str, dtype: str) -> None:
        """Publish an adapter in `dtype`, the dtype of the engines' slots, from the next connect on."""
        self._parts[name].adapter.cast(dtype)

    def sync_close_adapter(self, name: str) -> None:
        """Forget an adapter. Safe to call twice."""
        if part := self._parts.get(name):
            part.adapter.close()
        self._parts = {other: part for other, part in self._parts.items() if other != name}

    def sync_adapter(self, spec: AdapterSpec, method: str, *args: Any) -> Any:  # noqa: ANN401
        """Call a ``sync_…`` method of one adapter, with the adapter's own plan, holder and version."""
        return getattr(self.sync_part(spec.name), method)(*args)

    def sync_part(self, name: str) -> AdapterShard:
        """Return an adapter's shard. Raises StateError if there is none."""
        if name not in self._parts:
            raise StateError(f"this process does not know adapter {name}: register it again")
        return self._parts[name]

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


class AdapterShard(Shard):
    """One rank of a LoRA adapter, with its own plan, holder and version.

    Attributes:
        adapter: the source of the adapter's weights.
    """

    def __init__(self, trainer: TrainerShard, adapter: str) -> None:
        """`adapter` is PEFT's name of one in the `trainer`'s model. Raises ConfigError if it has none."""
        self._trainer, self.adapter = trainer, LoraSource(trainer.model, adapter)
        self._slot = None if self.adapter.is_on_gpu else f"pid-{os.getpid()}"
        self._here = trainer._here

    def _current_source(self) -> Source:
        if self.adapter.model is not self._trainer.model:
            self.adapter.replace(self._trainer.model)
        return self.adapter


def _kinds(models: Models) -> tuple[bool, bool]:
    """Return whether the model, and the draft, are missing."""
    model, draft = models
    return model is None, draft is None
