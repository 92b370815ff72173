"""Direct updates over real holders and engines; memory that no GPU maps is copied by numpy instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.test_controller import CONFIG, Loop
from weightsync.config import SyncConfig
from weightsync.driver.controller import Controller
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineSeat
from weightsync.errors import ConfigError, TransportError
from weightsync.holder.holder import Holder
from weightsync.holder.staging import HostStaging
from weightsync.memory.addresses import local_tensors
from weightsync.plan import Plan, RankLayout, Reads
from weightsync.protocol.handles import Attached, BufferHandle, DeviceHandle, Export
from weightsync.protocol.messages import FeedTicket
from weightsync.report import Link
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalPeer

Memory = Mapping[str, torch.Tensor]


class Shared:
    """The live memory of all ranks, by the `ipc` of their handles."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def export(self, layout: RankLayout, live: Memory) -> Export:
        handles = {}
        for name, tensor in live.items():
            ipc = str(tensor.data_ptr()).encode()
            self._arrays[ipc] = tensor.detach().view(torch.uint8).reshape(-1).numpy()
            handles[name] = DeviceHandle("cuda:fake", 0, ipc, 0, tensor.nbytes)
        return Export(layout, handles)

    def buffer(self, handle: DeviceHandle) -> torch.Tensor:
        return torch.from_numpy(self._arrays[handle.ipc])

    def copy(self, reads: Reads, sources: Mapping[tuple[int, str], DeviceHandle], into: Export) -> None:
        columns = (reads.trainer.tolist(), reads.src_buffer.tolist(), reads.dst_buffer.tolist())
        for trainer, src_name, dst_name, row in zip(*columns, reads.table().tolist(), strict=True):
            src, dst, rows, nbytes, src_pitch, dst_pitch = row
            source = self._arrays[sources[trainer, reads.src_names[src_name]].ipc]
            target = self._arrays[into.buffers[reads.dst_names[dst_name]].ipc]
            for i in range(rows):
                at = src + i * src_pitch
                target[dst + i * dst_pitch :][:nbytes] = source[at : at + nbytes]


class Source(ModuleSource):
    """Publishes on the host, and shows where its weights lie as if that were a GPU."""

    shared: Shared

    def attach(self, plan: Plan, trainer: int, arena: BufferHandle | None) -> Attached:
        attached = super().attach(plan, trainer, arena)
        return replace(attached, export=self.shared.export(self.layout(), local_tensors(self.model)))


class Engine(DictEngine):
    """Its memory is written by its holder."""

    shared: Shared
    export: Export
    num_written = 0

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        (attached,) = super().attach(plan, tickets, timeout_s)
        self.export = self.shared.export(self.layout()[0], self.tensors)
        return [replace(attached, export=self.export)]

    def written(self) -> None:
        self.num_written += 1


class Staging(HostStaging):
    """Buckets go out to engines by `write`, and `pull` copies."""

    shared: Shared
    engine: Engine
    written: list[int]
    writes = True  # type: ignore[assignment]
    unreachable = False

    def connect(self, trainer: Export) -> None:
        self.source = {name: self.shared.buffer(handle) for name, handle in trainer.buffers.items()}

    def link(self, engine: Export | None) -> None: ...

    def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        if self.unreachable:
            raise TransportError("no peer access")
        self._reads, self._memory = reads, memory

    def pull(self) -> None:
        self.shared.copy(self._reads, self._memory, self.engine.export)

    def write(self, bucket: int) -> None:
        self.written.append(bucket)
        plan = self.engine._plan
        assert plan is not None
        slot = self._slots[bucket % len(self._slots)].tensor
        for piece in plan.bucket(bucket).pieces:
            meta = plan.tensors[piece.tensor]
            data = slot[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, meta.dtype))
            self.engine.tensors[meta.name][piece.box.slices()].copy_(data.view(piece.box.extent))


class Direct(Loop):
    """Two engines whose memory their holders write, and a trainer that they can read."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        shared = Shared()
        self.source = Source(self.model)
        self.source.shared = shared
        self.fleet.trainers[0] = (LocalPeer(self.source), 0)
        self.holders[0]._stage = self.staging(self.holders[0])  # type: ignore[method-assign]
        for holder, (name, plain) in zip(self.holders[1:], self.engines.items(), strict=True):
            engine = Engine(name, plain.tensors)
            engine.shared, self.engines[name] = shared, engine
            self.fleet.engines[name].peer = LocalPeer(engine)
            holder._stage = self.staging(holder, engine)  # type: ignore[method-assign]

    def staging(self, holder: Holder, engine: Engine | None = None) -> Callable[[Plan, int, bool], Staging]:
        def stage(plan: Plan, index: int, receives: bool) -> Staging:
            made = Staging(plan, index, holder._arena, receives)
            made.written, made.shared = [], self.source.shared
            if engine:
                made.engine = engine
            return made

        return stage

    def cut_off(self, holder: int) -> None:
        """A holder that cannot map the trainers' memory."""
        stage = self.holders[holder]._stage

        def unreachable(plan: Plan, index: int, receives: bool) -> Staging:
            made = stage(plan, index, receives)
            assert isinstance(made, Staging)
            made.unreachable = True
            return made

        self.holders[holder]._stage = unreachable  # type: ignore[method-assign, assignment]

    def broadcasts(self) -> list[int]:
        """Every bucket that any holder begins to broadcast from now on."""
        begun: list[int] = []
        for holder in self.holders:
            start = holder._start

            def started(plan: Plan, staging: Staging, bucket: int, timeout_s: float, start=start) -> object:  # type: ignore[no-untyped-def]
                begun.append(bucket)
                return start(plan, staging, bucket, timeout_s)

            holder._start = started  # type: ignore[method-assign, assignment]
        return begun


def drive(work: Callable[[Direct], Coroutine[object, object, None]], config: SyncConfig = CONFIG) -> None:
    loop = Direct(config)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()


def test_engines_read_their_parts_and_nothing_is_broadcast() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        begun = loop.broadcasts()
        for version in (1, 2):
            loop.train()
            report = await loop.controller.update(version)
            assert report.routes == {"e0": "direct", "e1": "direct"}
            assert report.verified
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")
            assert report.num_buckets == 0
        assert begun == []
        assert loop.engines["e0"].num_written == 2
        nbytes = sum(tensor.nbytes for tensor in loop.model.state_dict().values())
        assert loop.controller.links() == [
            Link("trainer 0", f"engine {name} rank 0", "same host", nbytes) for name in ("e0", "e1")
        ]

    drive(work)


def test_tensors_of_another_dtype_are_broadcast_in_the_same_update() -> None:
    async def work(loop: Direct) -> None:
        for engine in loop.engines.values():
            engine.tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.bfloat16)
        await loop.controller.connect()
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"direct"}
        assert report.verified
        assert loop.controller.plan is not None
        names = [meta.name for meta in loop.controller.plan.tensors]
        cast = {
            bucket.index
            for bucket in loop.controller.plan.buckets()
            if "1.weight" in {names[piece.tensor] for piece in bucket.pieces}
        }
        assert set(begun) == cast
        assert report.num_buckets == len(cast)
        assert len(cast) < loop.controller.plan.num_buckets
        for name, tensor in loop.model.state_dict().items():
            held = loop.engines["e1"].tensors[name]
            assert torch.equal(tensor.to(held.dtype), held)

    drive(work)


def test_one_that_cannot_read_takes_broadcasts_beside_one_that_does() -> None:
    async def work(loop: Direct) -> None:
        loop.cut_off(2)
        await loop.controller.connect()
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(1)
        assert report.routes == {"e0": "direct", "e1": "no peer access"}
        assert loop.controller.plan is not None
        assert set(begun) == set(range(loop.controller.plan.num_buckets))
        for index, name in enumerate(loop.engines, start=1):
            staging = loop.holders[index]._staging
            assert isinstance(staging, Staging)
            assert (staging.written == []) == (report.routes[name] == "direct")
            assert loop.holds_the_models_weights(name)

    drive(work)


def test_direct_alone_is_refused_where_an_engine_cannot_read() -> None:
    async def work(loop: Direct) -> None:
        loop.cut_off(2)
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e1.*no peer access"):
            await loop.controller.connect()

    drive(work, replace(CONFIG, mode="direct"))


def test_broadcast_alone_is_what_it_says() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"sync.mode is broadcast"}
        assert loop.holds_the_models_weights("e0")

    drive(work, replace(CONFIG, mode="broadcast"))


def test_an_engine_that_read_what_was_not_sent_is_stale_and_takes_broadcasts_from_then_on() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging = loop.holders[2]._staging
        assert isinstance(staging, Staging)
        pull = staging.pull

        def half() -> None:
            pull()
            next(iter(loop.engines["e1"].tensors.values())).view(torch.uint8)[0] ^= 1

        staging.pull = half  # type: ignore[method-assign]
        loop.train()
        report = await loop.controller.update(1)
        assert report.states == {"e0": "SERVING", "e1": "STALE"}
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        assert report.routes["e0"] == "direct"
        assert "what it read was wrong" in report.routes["e1"]
        assert loop.fleet.engines["e1"].record.state is EngineState.SERVING
        assert loop.holds_the_models_weights("e1")

    drive(work)


def test_what_is_published_on_the_host_is_broadcast_and_direct_is_refused() -> None:
    loop = Loop(CONFIG)
    refused = Controller(replace(CONFIG, mode="direct"), loop.fleet)

    async def work() -> None:
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e0: .*not read in place.*auto takes"):
            await refused.connect()
        await loop.controller.connect()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"the trainers' weights are not read in place"}
        assert report.num_buckets > 0
        assert loop.holds_the_models_weights("e1")

    try:
        asyncio.run(work())
    finally:
        loop.close()


def test_an_engine_whose_holder_cannot_write_takes_broadcasts() -> None:
    async def work(loop: Direct) -> None:
        engine = loop.engines["e1"]
        attach = engine.attach

        def alone(plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
            return [replace(each, export=None) for each in attach(plan, tickets, timeout_s)]

        engine.attach = alone  # type: ignore[method-assign]
        loop.holders[2]._stage = lambda plan, index, receives: HostStaging(plan, index, None, receives)  # type: ignore[method-assign]
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert report.routes["e0"] == "direct"
        assert report.routes["e1"].startswith("its memory is not written by its holders: quantised")
        assert report.verified
        assert loop.holds_the_models_weights("e0")
        assert loop.holds_the_models_weights("e1")

    drive(work)


def test_one_that_comes_later_in_anothers_place_reads_directly_too() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        staging, dead = loop.holders[2]._staging, loop.engines["e1"]
        assert isinstance(staging, Staging)
        engine = Engine("e1", {name: torch.zeros_like(tensor) for name, tensor in dead.tensors.items()})
        engine.shared = staging.shared
        dead.close()
        staging.engine = loop.engines["e1"] = engine
        loop.fleet.engines["e1"] = EngineSeat(LocalPeer(engine), (2,))
        await loop.controller.adopt("e1")
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(2)
        assert report.routes == {"e0": "direct", "e1": "direct"}
        assert report.engines == {"e0": 2, "e1": 2}
        assert begun == []
        assert loop.holds_the_models_weights("e1")

    drive(work)
