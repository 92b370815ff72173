"""Parts for tests: an engine without a model, peers without Ray, and faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.channel.feed import EngineFeed
from weightsync.channel.sink import PieceView
from weightsync.config import Components, PrefixCache
from weightsync.engines.base import (
    CachesPrefixes,
    Completion,
    Engine,
    ExportsAhead,
    HasComponents,
    MovesExperts,
    Prompts,
    Rollout,
)
from weightsync.engines.serving.engine_digests import EngineDigests
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.texts import token_ids
from weightsync.errors import StateError
from weightsync.faults import Fault, FaultPlan
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.fingerprints import publish_report
from weightsync.memory.offload import Offload
from weightsync.memory.tensors import byte_strides, metas_of
from weightsync.plan import Plan, RankLayout, Segment
from weightsync.plan.layout.arrangement import Experts
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.handles import BufferHandle
from weightsync.protocol.messages import (
    Attached,
    Digests,
    FeedTicket,
    HolderDigests,
    Loaded,
    LoadReport,
    PublishReport,
    PublishTask,
)
from weightsync.sources import ExportsWeights, Source, changed, compare

__all__ = ["DictEngine", "Fault", "FaultPlan", "LocalEngine", "LocalPeer", "LocalTrainer"]


class DictEngine:
    """An Engine whose weights are a dict of CPU tensors; `generate` returns its version.

    While the engine sleeps, the tensors have no memory. `on_write`, if set, is called with the tensor's name
    before a piece is written, and may fail, wait, or write other bytes.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name = name
        self.tensors = dict(tensors)
        self.version = 0
        self.paused = True
        self.on_write: Callable[[str], None] = lambda _: None
        self._feed: EngineFeed | None = None
        self._busy = threading.Lock()
        self._plan: Plan | None = None
        self._asleep: Offload | None = None

    def layout(self) -> Sequence[RankLayout]:
        """Return a layout in which every tensor is whole, in a separate buffer."""
        metas = metas_of(self.tensors)
        strides = [*map(byte_strides, self.tensors.values())]
        segments = tuple(map(Segment.whole, metas, strides))
        return [RankLayout(metas, segments, buffers=metas)]

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect the only rank to the holder."""
        self.close()
        self._plan = plan
        self._feed = EngineFeed.open(tickets[0], plan, timeout_s, self.layout()[0], self._busy)
        return [Attached(self._feed.plan_digest, None, casts=self._feed.casts)]

    def pause(self, mode: str, timeout_s: float) -> None:
        """Pause, and wake up if asleep. No request runs."""
        self.paused = True
        if self._asleep:
            self._asleep.undo()
            self._asleep = None

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the tensors' memory."""
        self.paused = True
        tensors = self.tensors.values()
        self._asleep = self._asleep or Offload(tensors, keep=tensors if level == 1 else ())

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Take one attempt's buckets. Returns the digests of the tensors."""
        assert self._feed is not None
        assert self._asleep is None
        return [Loaded(self._feed.receive(attempt, self, timeout_s), self._feed.spans)]

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Copy one bucket's pieces into the tensors."""
        assert self._plan is not None
        for tensor, box, data in pieces:
            name = self._plan.tensors[tensor].name
            self.on_write(name)
            self.tensors[name][box.slices()].copy_(data)

    def written(self, by_holder: HolderDigests | None = None) -> None:
        """Do nothing: tensors that did not come, such as frozen tensors, are in memory."""

    def finish(self) -> None:
        """Do nothing: the tensors are live."""

    def digests(self) -> Digests:
        """Return the digests of the live tensors."""
        assert self._plan is not None
        metas = self._plan.tensors
        return np.array([tensor_digest(self.tensors[m.name], m.shape) for m in metas], dtype=np.uint64)

    def resume(self, version: int) -> None:
        """Serve `version`."""
        self.version, self.paused = version, False

    def serving(self) -> int:
        """Return the version being served, 0 while paused."""
        return 0 if self.paused else self.version

    def generate(self, prompts: Prompts, sampling: Mapping[str, Any]) -> Rollout:
        """Return one token per completion: the version."""
        if self.paused:
            raise StateError(f"engine {self.name} serves no version")
        ids = token_ids(prompts, Sampling.of(sampling), None)
        return Rollout.of([Completion([self.version], [(self.version, 1)], [0.0], "length") for _ in ids])

    def close(self) -> None:
        """Disconnect from the holder."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class LocalPeer:
    """Makes an object a peer of the controller. The object's methods run on other threads.

    Attributes:
        name: the object's name, if it has one.
        target: the object.
    """

    def __init__(self, target: object) -> None:
        self.name: str = getattr(target, "name", "")
        self.target = target

    def __getattr__(self, method: str) -> Callable[..., Any]:
        function = getattr(self.target, method)

        async def call(*args: object) -> object:
            return await asyncio.to_thread(function, *args)

        return call


class LocalTrainer(LocalPeer):
    """Makes a `Source` a trainer rank of the controller."""

    _described: LayoutTable | None = None

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._source = source

    async def outline(self) -> Outline:
        self._described = await self.layout()
        return self._described.outline()

    async def layout(self) -> LayoutTable:
        described, self._described = self._described, None
        return described or LayoutTable.of(await asyncio.to_thread(self._source.layout))

    async def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        self._frozen, self._described = plan.frozen, None
        return await asyncio.to_thread(self._source.attach, plan, trainer, send_buffer)

    def ask_readable(self, readable: asyncio.Future[None]) -> asyncio.Future[bool] | None:
        return None

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        source = self._source
        if isinstance(source, ExportsWeights) and await asyncio.to_thread(source.ready):
            readable.set_result(None)
        published = await asyncio.to_thread(source.publish, task.count)
        self._digests = published.digests
        self._compared = await asyncio.to_thread(compare, source, task.rounds) if task.rounds else None
        density = await asyncio.to_thread(changed, source) if task.density else {}
        return publish_report(published, self._frozen, (), self._compared, density)

    async def digests(self) -> Digests:
        return self._digests

    async def replica_digests(self) -> Digests:
        assert self._compared
        return self._compared.digests


class LocalEngine(LocalPeer):
    """Makes an `Engine` a peer of the controller."""

    _described: Sequence[LayoutTable] = ()

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine = engine

    async def outline(self, components: Components) -> Sequence[Outline]:
        self._described = ()
        return [each.outline() for each in await self.layout(components)]

    async def layout(self, components: Components) -> Sequence[LayoutTable]:
        if isinstance(self._engine, HasComponents):
            self._engine.use_components(components)
        return await self._describe()

    async def _describe(self) -> Sequence[LayoutTable]:
        layout = self._engine.layout
        self._described = self._described or [*map(LayoutTable.of, await asyncio.to_thread(layout))]
        return self._described

    async def export(self, components: Components) -> Sequence[DeviceMemory | None]:
        return await asyncio.to_thread(self._engine.export) if isinstance(self._engine, ExportsAhead) else ()

    async def attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float, prefix_cache: PrefixCache
    ) -> Sequence[Attached]:
        self._digests, self._described = EngineDigests(plan, await self._describe()), ()
        attached = await asyncio.to_thread(self._engine.attach, plan, tickets, timeout_s)
        self._digests.attach(attached)
        if isinstance(self._engine, CachesPrefixes):
            self._engine.use_prefix_cache(prefix_cache)
        return attached

    async def load(self, attempt: int, timeout_s: float) -> LoadReport:
        return self._digests.report(await asyncio.to_thread(self._engine.load, attempt, timeout_s))

    async def experts(self) -> Experts:
        return await asyncio.to_thread(self._engine.experts) if isinstance(self._engine, MovesExperts) else ()

    async def live_digests(self) -> LoadReport:
        assert isinstance(self._engine, MovesExperts)
        return self._digests.report(await asyncio.to_thread(self._engine.live_digests))

    async def digests(self) -> Digests:
        return self._digests.table
