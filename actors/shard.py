"""A trainer actor's side of updates, for one source of weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from weightsync.actors.ray.claim import Claimable
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.publish_notices import TrainerNode, published, readable
from weightsync.actors.ray.readiness import Readiness
from weightsync.errors import RestartedError, StateError
from weightsync.faults import Fault, inject, set_faults
from weightsync.memory.kernels.fingerprints import publish_report
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node, serve
from weightsync.plan import Plan
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.protocol.handles import BufferHandle, DeviceHandle
from weightsync.protocol.messages import Attached, Compared, Digests, PublishReport, PublishTask
from weightsync.protocol.timing import PhaseClock
from weightsync.sources import ExportsWeights, Source, changed, compare


class Shard(Claimable):
    """Base class of shards with their own plan, holder and version: a trainer's model, or an adapter."""

    _slot: str | None = None
    _attached: Source | None = None
    _described: LayoutTable | None = None
    _attached_plan: Plan | None = None
    _digests: Digests | None = None
    _compared: Compared | None = None
    _node: Node | None = None
    _readiness: Readiness | None = None
    _gpu: int | None = None
    _here: Callable[[str | None], Placement] = staticmethod(Placement.here)

    @abstractmethod
    def _current_source(self) -> Source:
        """Return the source of the weights to publish now."""

    def sync_placement(self) -> Placement:
        """Return where this rank runs."""
        return self._here(self._slot)

    def sync_placement_so_far(self) -> Placement | None:
        """Return where this rank runs, None before the rank has chosen a GPU."""
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

    def sync_attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Map the holder's send buffer, or let the holder read this rank's memory in place."""
        self._attached, self._described = self._current_source(), None
        self._attached_plan = plan
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        return self._attached.attach(plan, trainer, send_buffer)

    def sync_serve_node(self, offer: NodeOffer) -> None:
        """Have a node answer calls that come before or in place of `publish`, see `TrainerNode`.

        The node's threads have the actor's GPU as current device. Returns before the node has dialled.
        """
        if self._node:  # of a driver that died, or of a link that has ended
            self._node.stop()
        self._readiness = Readiness(self._ready)
        self._node = serve(offer, _Early(self, self._readiness), TrainerNode)

    def sync_on_its_gpu(self) -> AbstractContextManager[object]:
        """Make the actor's GPU the current device of this thread."""
        return nullcontext() if self._gpu is None else torch.cuda.device(self._gpu)

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> PublishReport:
        """Publish this rank's share: copy it to its holder, or on a GPU in place.

        In place, tell the driver once holders may read the share, then digest it. Without a `ticket`, tell
        nobody. If it `tells`, the driver gets the report by the node, too.
        """
        report = self.sync_publish_once(task, ticket)
        if tells and self._node:
            self._node.notify(published(ticket, report))
        return report

    def sync_publish_once(self, task: PublishTask, ticket: int) -> PublishReport:
        """Publish, or return the report of the same `ticket`."""
        publish = partial(self._publish, task, partial(self._tell, ticket))
        return self._readiness.once(ticket, publish) if self._readiness else publish()

    def _publish(self, task: PublishTask, tell: Callable[[], None]) -> PublishReport:
        """Publish. `tell` has weights ready, and says if holders may read them."""
        clock = PhaseClock()
        with clock.phase("publish"):
            source = self._attached_source()
            tell()
            inject("publish")
            published = source.publish(task.count)
            self._compared = compare(source, task.rounds) if task.rounds else None
            density = changed(source) if task.density else {}
        assert self._attached_plan is not None
        self._digests = published.digests
        return publish_report(published, self._attached_plan.frozen, clock.spans, self._compared, density)

    def _tell(self, ticket: int) -> None:
        is_known = self._readiness is not None and self._readiness.has_said(ticket)
        if not is_known and self._ready() and ticket and self._node:
            self._node.notify(readable(ticket))

    def _ready(self) -> bool:
        source = self._attached_source()
        return isinstance(source, ExportsWeights) and source.ready()

    def sync_digests(self) -> Digests:
        """Return the digests that this rank published last, uint64[num_tensors]."""
        if self._digests is None:
            raise StateError("nothing was published yet")
        return self._digests

    def sync_replica_digests(self) -> Digests:
        """Return the digests of boxes that other ranks hold, too, as last compared: see `Compared`."""
        if self._compared is None:
            raise StateError("nothing was compared yet")
        return self._compared.digests

    def _attached_source(self) -> Source:
        source = self._current_source()
        if self._attached is None:
            raise RestartedError
        if source is not self._attached:
            raise StateError("self.source was replaced after connect(): call connect() again")
        return source

    def sync_set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults of this process, see `weightsync.faults.set_faults`."""
        set_faults(process, faults, seed)


class _Early:
    """The calls of a trainer's node, see `TrainerNode`."""

    def __init__(self, shard: Shard, readiness: Readiness) -> None:
        self._shard, self._readiness = shard, readiness

    def readable(self, ticket: int) -> bool:
        with self._shard.sync_on_its_gpu():
            return self._readiness.early(ticket)

    def publish_in_place(self, task: PublishTask, ticket: int) -> PublishReport:
        with self._shard.sync_on_its_gpu():
            return self._shard.sync_publish_once(task, ticket)
