"""Publishes the weights that a rank has in tensors, whatever framework shards them."""

from __future__ import annotations

import dataclasses
import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from weightsync.errors import MovedError, StateError, TransportError
from weightsync.memory.addresses import local_tensor
from weightsync.memory.device import export_tensors
from weightsync.memory.file_names import MODELS, FileRenaming
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.device_kernels import load_digests
from weightsync.memory.kernels.digests import warm_up
from weightsync.memory.tensors import device_id, segment_view
from weightsync.plan import Box, Piece, Plan, RankLayout, Segment, share_in_place
from weightsync.plan.broadcast.plan import by_tensor, holding
from weightsync.plan.layout.experts import stack_experts
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.handles import BufferHandle, DeviceHandle
from weightsync.protocol.messages import Attached, Compared, Digests, Published, Sample, combine
from weightsync.sources.claimed_boxes import ClaimedBoxes
from weightsync.sources.density import DensitySample
from weightsync.sources.difference import difference
from weightsync.sources.in_place import InPlace
from weightsync.sources.local_weights import LocalWeights, Transform
from weightsync.sources.offloaded import Offloaded, OffloadedPart
from weightsync.sources.piece_copies import PieceCopies
from weightsync.sources.readable import require_values
from weightsync.sources.selection import Names, Selection

logger = logging.getLogger("weightsync.sources")


class Guard(Protocol):
    """Compares a model's tensors with the tensors at the last preparation.

    Attributes:
        strays: names of tensors that must be looked up for each version.
    """

    strays: frozenset[str]

    def as_before(self, model: Any) -> bool:  # noqa: ANN401 - a framework's
        """Return True if `model` certainly holds the same tensors at the same addresses."""

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors whose address, shape, strides or dtype changed."""


class TensorSource(ABC):
    """Base class of sources whose weights are tensors in this process.

    A subclass describes a rank's weights in `_weights`, and notices changes in `_watch`.

    If several ranks hold a box, all of them declare the box, and the plan chooses the sender. If all weights
    are on one GPU and can be shared, holders read the weights in place, see `Source`. With `offloads` holders
    get copies, since memory that a holder has mapped cannot be released.

    Attributes:
        model: the model. `replace` sets another model of the same layout.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a framework's
        exclude: Collection[str] = (),
        *,
        names: Names | None = None,
        frozen: Collection[str] = (),
        offloads: bool = False,
        hf_config: Any = None,  # noqa: ANN401 - transformers'
        before: Sequence[Transform] = (),
        after: Sequence[Transform] = (),
    ) -> None:
        """Most arguments are those of `TrainerShard`.

        Args:
            hf_config: for models that do not name tensors.
            before: transforms of tensors with the model's own names, before `names`, `exclude` and `frozen`.
            after: transforms of the tensors that are selected, with names of the checkpoint.
        """
        del hf_config
        self.model = model
        self._guard: Guard | None = None
        self._rank = 0
        self._selection = Selection(exclude, names, frozen)
        self._before, self._after = before, after
        self._computed: Mapping[str, torch.Tensor] = {}
        self._offloads = offloads
        self._offloaded: Offloaded | None = None
        self._in_send_buffer: Published | None = None
        self._names = FileRenaming()
        self._layout: RankLayout | None = None
        self._exported: DeviceMemory | None = None
        self._send_buffer: SharedBuffer | None = None
        self._in_place: InPlace | None = None
        self._is_ready = self._is_replaced = False
        self._plan: Plan | None = None
        self._copies: PieceCopies | None = None
        self._layout_now: RankLayout | None = None
        self._claimed: ClaimedBoxes | None = None
        self._density: DensitySample | None = None
        self._before_offload: Sequence[Compared] = ()

    @abstractmethod
    def _weights(self) -> LocalWeights:
        """Describe this rank's weights as they are now, in a checkpoint's names."""

    @abstractmethod
    def _watch(self, weights: LocalWeights) -> Guard:
        """Return a guard of `weights`, the result of the last `_weights`."""

    @property
    def _module(self) -> Any:  # noqa: ANN401 - a framework's
        """Return the module whose tensors `_weights` names."""
        return self.model

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._weights().tensors

    def _finish(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Complete this version in the tensors of `_weights`, which was called before.

        Raises StateError if the version cannot be completed.
        """

    def _complete(self) -> None:
        """Finish the weights of this version, and run all transforms."""
        self._finish()
        for each in (*self._before, *self._after):
            each.run(self._module, self._tensors())

    @collector_paused
    def layout(self) -> RankLayout:
        """Return global shapes, this rank's boxes, and tied names.

        Raises StateError if the model changed while it was offloaded, PlanError for a tensor without values.
        """
        weights = self.describe()
        layout, buffers, device = weights.layout, {**weights.tensors, **weights.computed}, ""
        self._computed = weights.computed
        if self._offloaded:
            _require_as_offloaded(self._rank, self._guard, weights.tensors)
        else:
            require_values(layout, buffers)
        self._complete()
        if not self._offloads:
            names = dict.fromkeys(segment.buffer for segment in layout.segments)
            held = {name: local_tensor(buffers[name]) for name in names}
            device, self._exported = _share(held)
            if self._exported:
                gpu = next(iter(held.values())).device
                on_daemon(partial(_load_kernels, gpu, layout), "weightsync-kernels")
        self._layout = dataclasses.replace(layout, device=device)
        self._guard = self._watch(weights)
        return self._layout

    def describe(self) -> LocalWeights:
        """Return this rank's weights with the checkpoint's names, without excluded tensors.

        Raises ConfigError if a setting fits none of the names.
        """
        weights = _transformed(self._module, self._weights(), self._before)
        unmatched = self._selection.check(
            _as_in_files(self._names, self.model, weights.layout), weights.excluded
        )
        weights = self._selected(weights)
        if not (stage := weights.layout.stage):
            return weights
        stage = dataclasses.replace(stage, unmatched=unmatched)
        return dataclasses.replace(weights, layout=dataclasses.replace(weights.layout, stage=stage))

    def trial_handle(self) -> DeviceHandle | None:
        """Return the handle of a tensor that `layout` exported, or None."""
        return self._exported.first() if self._exported else None

    def _selected(self, weights: LocalWeights) -> LocalWeights:
        """Rename and select weights, and apply the transforms of `after`."""
        layout = self._selection.of(_as_in_files(self._names, self.model, weights.layout))
        layout = stack_experts(layout, weights.num_experts) if weights.num_experts else layout
        return _transformed(self._module, dataclasses.replace(weights, layout=layout), self._after)

    def replace(self, model: Any) -> None:  # noqa: ANN401 - a framework's
        """Use the weights of `model` from now on. Raises StateError while weights are offloaded."""
        if self._offloaded:
            raise StateError(
                f"trainer {self._rank}: another model took the place of one that is offloaded: onload() first"
            )
        self.model = model
        self._is_replaced = True

    @collector_paused
    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Map the send buffer and prepare all copies, or prepare publishing in place."""
        self.close()
        layout = self._layout or self.layout()
        self._rank, self._plan, self._layout_now = trainer, plan, layout
        if plan.replicas:
            self._claims()  # so that no update waits for it
        if send_buffer is None:
            live = self._live()
            parts = [
                (tensor, box, _view(live[segment.buffer], segment, box))
                for tensor, box, segment in share_in_place(plan, trainer, layout)
            ]
            self._in_place = InPlace(plan, parts, live[layout.segments[0].buffer].device)
            return Attached(plan.digest(), self._exported)
        warm_up()
        self._send_buffer = SharedBuffer.open(send_buffer)
        self._make_copies()
        if self._offloads or (self._copies and self._copies.has_device_copies):
            self._send_buffer.pin()
        return Attached(plan.digest(), None)

    def _make_copies(self) -> None:
        assert self._plan is not None
        assert self._guard is not None
        assert self._layout_now is not None
        pieces = _pair(self._plan, self._rank, self._layout_now)
        if self._send_buffer is None:
            raise StateError(f"trainer {self._rank}: it is not connected: call connect() again")
        memory = self._send_buffer.tensor
        self._copies = PieceCopies(self._plan, pieces, self._live(), self._guard.strays, memory)

    def ready(self) -> bool:
        """Finish writing weights that are read in place. Returns False for other weights.

        To look through thousands of tensors for moved ones takes as long as to send all of them. `publish`
        looks while holders read: the memory stays allocated. If the model uses other memory by then,
        `publish` raises, and no engine serves the bytes. Raises as `publish`.
        """
        if self._in_place is None:
            return False
        if self._is_replaced or not self._in_place.has_memory():
            self._follow()
        self._is_replaced = False
        self._complete()
        self._in_place.wait_written()
        self._is_ready = True
        return True

    def publish(self, count: bool) -> Published:
        """Copy the current weights to the send buffer, and digest them, or only digest in place.

        If the engine has another float dtype, copies cast. While weights are offloaded, the result of
        `offload` is returned.

        Raises:
            MovedError: weights that are read in place are at other addresses, with the same layout.
            StateError: the model's layout has changed since connect, the model changed while it was
                offloaded, or it is not whole; names this rank and the tensor.
        """
        assert self._plan is not None
        if self._in_place is None:
            self._follow()
            self._complete()
            if self._in_send_buffer is not None:
                return self._in_send_buffer
            if self._copies is None:  # an `offload` that failed gave them up
                self._make_copies()
            assert self._copies
            published = self._copies.run(self._live, count)
            return self._confirmed(published, partial(self._copies.digest_again, self._live))
        if not self._is_ready:
            self.ready()
        self._is_ready = False
        self._in_place.begin()
        if self._follow():
            self._complete()
            self._in_place.begin()  # FSDP had gathered it: digest what it is now
        return self._confirmed(self._in_place.result(count), self._in_place.digest_again)

    def compare_replicas(self, rounds: Sequence[int]) -> Compared:
        """Digest boxes that other ranks also hold, see `ComparesReplicas`. Called after `publish`."""
        if self._in_send_buffer is not None:
            made = [self._before_offload[number] for number in rounds]
            return Compared(combine([x.digests for x in made]), combine([x.agreement for x in made]))
        return self._claims().compare(rounds, self._live)

    def changed(self) -> Mapping[str, Sample]:
        """Sample what changed since the version before, see `MeasuresDensity`."""
        if self._density is None and self._plan and (self._in_place or self._copies):
            self._density = DensitySample(self._plan, _published_parts(self._in_place, self._copies))
        return self._density.changed() if self._density else {}

    def _claims(self) -> ClaimedBoxes:
        if self._claimed is None:
            assert self._plan is not None
            assert self._guard is not None
            assert self._layout_now is not None
            held, strays = self._live(), self._guard.strays
            self._claimed = ClaimedBoxes(self._plan, self._rank, self._layout_now, held, strays)
        return self._claimed

    def offload(self) -> None:
        """Copy all tensors to the send buffer, and release their memory.

        If the send buffer has a tensor in another dtype, or only in part, the host stores a copy, too.
        Raises StateError without `offloads`, since the holder may have mapped the memory.
        """
        if not self._offloads:
            raise StateError("the holder may read this memory in place: give TrainerShard offloads=True")
        if self._offloaded is None:
            stored: dict[str, list[OffloadedPart]] = {}
            published = self.publish(count=True) if self._send_buffer else None
            if published and self._plan and self._plan.replicas:
                rounds = range(self._plan.replicas.num_rounds)
                self._before_offload = [self.compare_replicas([number]) for number in rounds]
            if self._copies:
                for copy in self._copies.copies:
                    index = copy.box.slices(copy.segment.box)
                    part = OffloadedPart(copy.segment, index, self._copies.place(copy))
                    stored.setdefault(copy.segment.buffer, []).append(part)
            # Both own memory on the GPU, and are made again after `onload`.
            self._copies = self._claimed = None
            self._offloaded = Offloaded(self._live(), stored)
            self._in_send_buffer = published
            self._guard = self._watch(self._weights())

    def onload(self) -> None:
        """Undo `offload`: the same values, in new memory."""
        if self._offloaded:
            self._offloaded.undo()
            self._offloaded = self._in_send_buffer = self._guard = None

    def _follow(self) -> bool:
        """Prepare again if the model's tensors were replaced or moved since the last call.

        Returns whether the weights had to be described again.
        """
        assert self._layout is not None
        if self._guard and self._guard.as_before(self.model):
            return False
        weights = self._weights()
        if self._guard and self._guard.as_before(self.model):
            return True  # FSDP had only gathered it, and state_dict undid that
        if self._offloaded:
            _require_as_offloaded(self._rank, self._guard, weights.tensors)
        weights = self._selected(_transformed(self._module, weights, self._before))
        now = weights.layout
        if not self._offloaded:
            require_values(now, {**weights.tensors, **weights.computed})
        if changed := difference(self._layout, now):
            raise StateError(f"trainer {self._rank}: {changed}: connect() again")
        names = [each.buffer for each in now.segments if each.buffer in weights.tensors]
        kept = {name: weights.tensors[name] for name in names}
        moved = self._guard.moved(kept) if self._guard else []
        moved += [name for name, made in weights.computed.items() if made is not self._computed.get(name)]
        if self._in_place and moved:
            raise MovedError(f"trainer {self._rank}: {_listed(moved)}: connect() again")
        self._guard, self._layout_now, self._claimed = self._watch(weights), now, None
        self._computed = weights.computed
        if not self._in_place and not self._offloaded:
            if moved:
                logger.info("[trainer %d] attached again: %s", self._rank, _listed(moved))
            self._make_copies()
        return True

    def _confirmed(self, published: Published, digest_again: Callable[[], Digests]) -> Published:
        """Digest the weights once more, and name the tensors that were written meanwhile.

        If both passes find the same digests, the weights did not change between the passes. Torch's counters
        of writes prove less: they miss writes to DTensors, through ``.data`` and by other libraries.
        """
        assert self._plan is not None
        self._complete()
        written = np.flatnonzero(digest_again() != published.digests)
        names = tuple(self._plan.tensors[number].name for number in written)
        return dataclasses.replace(published, written=names) if names else published

    def close(self) -> None:
        """Disconnect from the holder. Offloaded tensors leave the send buffer first."""
        self._in_place, self._is_ready, self._copies, self._claimed = None, False, None, None
        self._density = None
        if self._offloaded and self._in_send_buffer is not None:
            self._offloaded.leave_send_buffer()
            self._in_send_buffer = None
        if self._send_buffer is not None:
            self._send_buffer.close()
            self._send_buffer = None

    def _live(self) -> Mapping[str, torch.Tensor]:
        if self._offloaded:
            return self._offloaded.on_host()
        live = {name: local_tensor(tensor) for name, tensor in self._tensors().items()}
        return {**live, **self._computed}


def _as_in_files(names: FileRenaming, model: object, layout: RankLayout) -> RankLayout:
    return names.renamed(model, layout) if MODELS in sys.modules else layout


def _transformed(model: Any, weights: LocalWeights, transforms: Sequence[Transform]) -> LocalWeights:  # noqa: ANN401
    for each in transforms:
        weights = each.apply(model, weights)
    return weights


def _require_as_offloaded(rank: int, guard: Guard | None, tensors: Mapping[str, torch.Tensor]) -> None:
    assert guard is not None
    if moved := guard.moved(tensors):
        raise StateError(f"trainer {rank}: {_listed(moved)}, while the weights are offloaded: onload() first")


def _published_parts(
    in_place: InPlace | None, copies: PieceCopies | None
) -> Iterable[tuple[int, torch.Tensor]]:
    if in_place:
        return [(tensor, held) for tensor, _, held in in_place.parts]
    assert copies is not None
    return [(copy.tensor, copies.place(copy)) for copy in copies.copies]


def _pair(plan: Plan, trainer: int, layout: RankLayout) -> tuple[tuple[Piece, Segment], ...]:
    """Return pairs of a piece that `trainer` sends and the segment in `layout` that has the piece."""
    held = [deque(segments) for segments in by_tensor(plan, layout)]
    return tuple((piece, holding(held[piece.tensor], piece.box)) for piece in plan.trainer_pieces(trainer))


def _view(buffer: torch.Tensor, segment: Segment, box: Box) -> torch.Tensor:
    """View `box`, a part of `segment`, in the buffer. Most boxes are whole segments."""
    whole = segment_view(buffer, segment)
    return whole if box == segment.box else whole[box.slices(segment.box)]


def _share(tensors: Mapping[str, torch.Tensor]) -> tuple[str, DeviceMemory | None]:
    """Return the device and memory of `tensors`, or "" and None if a send buffer is needed."""
    devices = {name: tensor.device for name, tensor in tensors.items()}
    gpu = next((device for device in devices.values() if device.type == "cuda"), None)
    if gpu is None:
        return "", None
    if strays := [name for name, device in devices.items() if device != gpu]:
        where = f"{strays[0]} is on {devices[strays[0]]}, not on {gpu}"
        share = f"{len(strays)} of {len(devices)} tensors"
        logger.warning("weights are copied through the host: %s (%s)", where, share)
        return "", None
    try:
        memory = export_tensors(tensors)
    except TransportError as error:
        logger.warning("weights are copied through the host: %s", error)
        return "", None
    return device_id(gpu), memory


def _load_kernels(gpu: torch.device, layout: RankLayout) -> None:
    """Load kernels while the plan is made, so that `attach` need not wait. `attach` reports errors."""
    with torch.cuda.device(gpu):
        load_digests((meta.itemsize for meta in layout.tensors), flags=True)


def _listed(moved: Sequence[str]) -> str:
    more = f" and {len(moved) - 1} more are" if len(moved) > 1 else " is"
    return f"{moved[0]}{more} in other memory than when it was connected"
