"""What goes wrong inside one member: the others hear of it soon, and half a version is not kept as whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fleets.loop import Loop, drive
from tests.patience import patient
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.config import SyncConfig
from weightsync.errors import DeadlineError, PeerError, StateError, TransportError
from weightsync.holder import device_staging, packed_pieces
from weightsync.holder.holder import Holder
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.memory import cuda, device
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Layout, Members, Plan, RankLayout, make_plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory, Export
from weightsync.protocol.handles import DeviceHandle
from weightsync.protocol.messages import Forward
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalPeer, LocalTrainer


class _Remote(LocalPeer):
    """As Ray answers: an error that is not ours comes as a PeerError."""

    def __getattr__(self, method: str):
        function = super().__getattr__(method)

        async def call(*args: object) -> object:
            try:
                return await function(*args)
            except RuntimeError as error:
                raise PeerError("holder 2", f"{type(error).__name__}: {error}") from error

        return call


def test_a_holder_whose_device_fails_tells_the_others_at_once_and_is_named() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        staging = loop.holders[2].staging

        def fill(bucket: int, timeout_s: float) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        assert staging is not None
        staging.fill = fill
        loop.fleet.holders[2] = _Remote(loop.holders[2])
        begun = time.monotonic()
        with pytest.raises(PeerError, match=r"holder 2.*illegal memory access"):
            await loop.controller.update(2)
        assert time.monotonic() - begun < patient(6)
        assert "illegal memory access" in str(loop.controller.engine_group.failures["e1"])
        assert (await loop.controller.connect()) is None
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(15), connect_timeout_s=patient(20)))


class Wide(Loop):
    """Of more buckets."""

    def make(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 31, bias=False) for _ in range(8)))


def test_an_engine_that_is_slow_at_every_bucket_does_not_hold_the_others_up() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        assert loop.controller.plan is not None
        assert loop.controller.plan.num_buckets == 8
        loop.engines["e1"].on_write = lambda _: time.sleep(patient(0.18))
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 0}
        assert "engine e1" in report.failures["e1"]

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=patient(0.5), connect_timeout_s=patient(20)), Wide)


def test_holders_that_were_half_published_to_refill_with_what_was_committed() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        whole = loop.fleet.trainers[0]

        class Half:
            def publish(self, count: bool) -> None:
                loop.train()
                loop.source.publish(count)
                raise DeadlineError("publish", ("trainer 1",), 1.0)

        loop.fleet.trainers[0] = (LocalTrainer(Half()), 0)
        with pytest.raises(DeadlineError):
            await loop.controller.update(2)
        loop.engines["e1"].tensors["0.weight"].zero_()
        assert (await loop.controller.refill("e1")).engines == {"e0": 1, "e1": 1}
        loop.fleet.trainers[0] = whole
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work)


def test_a_holder_that_was_replaced_refills_nobody() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.holders[0].close()
        loop.holders[0] = Holder("holder 0", "127.0.0.1")
        loop.fleet.holders[0] = LocalPeer(loop.holders[0])
        await loop.controller.connect()
        with pytest.raises(StateError, match="keeps the committed version"):
            await loop.controller.refill("e1")
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        await loop.controller.connect()
        assert (await loop.controller.refill("e1")).engines == {"e0": 2, "e1": 2}

    drive(work)


def plan_of(width: int) -> Plan:
    model = nn.Linear(width, 8)
    engine = DictEngine("e", {name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    source = Layout.from_ranks([ModuleSource(model).layout()])
    members = Members(1, (0,), (("e", (0,)),))
    wanted = {"e": Layout.from_ranks(engine.layout())}
    return make_plan(source, wanted, members, bucket_bytes=4096, max_staging_bytes=1 << 20)


def test_an_send_buffer_of_a_plan_that_was_not_finished_is_not_kept() -> None:
    first, second = plan_of(500), plan_of(3)

    def stage(plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool) -> HostStaging:
        if plan is second:
            raise TransportError("no memory")
        return HostStaging(plan, index, send_buffer, receives)

    holder = Holder("holder 0", "127.0.0.1", make_staging=stage)
    holder.prepare(first, 0, "")
    with pytest.raises(TransportError, match="no memory"):
        holder.prepare(second, 0, "")
    send_buffer = holder.prepare(first, 0, "").send_buffer
    assert send_buffer is not None
    assert send_buffer.nbytes == first.send_buffer_nbytes(0)
    holder.close()


def test_a_trainer_that_is_connected_again_lets_go_of_what_it_had_mapped() -> None:
    trainer = TrainerShard()
    trainer.model = nn.Linear(500, 8)
    plan = plan_of(500)

    def num_mapped() -> int:
        links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum("memfd:weightsync" in os.readlink(link) for link in links if link.is_symlink())

    before = num_mapped()
    for _ in range(3):
        holder = Holder("holder 0", "127.0.0.1")
        trainer.sync_layout()
        trainer.sync_attach(plan, 0, holder.prepare(plan, 0, "").send_buffer)
        holder.close()
    assert num_mapped() - before <= 2


def test_nothing_of_a_holder_that_was_closed_waits_on() -> None:
    holder = Holder("holder 0", "127.0.0.1")
    holder.prepare(plan_of(500), 0, "")
    watching = on_daemon(holder.watch)
    assert not wait([watching], 0.1).done
    holder.close()
    watching.result(patient(5))
    with pytest.raises(StateError, match="holder 0 has no plan"):
        holder.move(1, Forward(), 1.0)


def test_a_holder_is_ready_until_its_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: uncorrectable ECC error")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    Holder("holder 0", "127.0.0.1").ready()
    with pytest.raises(RuntimeError, match="ECC"):
        Holder("holder 0", "127.0.0.1", device="cuda:0").ready()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of allocations that are mapped now. One that is called ``gone`` cannot be mapped."""
    names: list[str] = []

    def open_handle(ipc: bytes) -> int:
        if ipc == b"gone":
            raise TransportError("its process is gone")
        names.append(ipc.decode())
        return 1000 * len(names)

    monkeypatch.setattr(cuda, "open_handle", open_handle)
    monkeypatch.setattr(cuda, "close_handle", lambda ipc: names.remove(ipc.decode()))
    monkeypatch.setattr(cuda, "view", lambda start, nbytes: torch.arange(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(device, "device_id", lambda _: "cuda:0")
    for module in (device_staging, packed_pieces):
        monkeypatch.setattr(module, "CopyTable", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return names


def exported(*names: str) -> Export:
    handles = {name: DeviceHandle("cuda:0", 1, name.encode(), 0, 8) for name in names}
    return Export(LayoutTable.of(RankLayout((), ())), DeviceMemory.of(handles))


def test_what_was_mapped_before_a_mapping_failed_is_let_go_of(mapped: list[str]) -> None:
    staging = device_staging.DeviceStaging(plan_of(3), 0, None, ())
    with pytest.raises(TransportError):
        staging.connect(exported("a", "b", "gone", "d"))
    assert mapped == ["a", "b"]
    staging.close()
    assert mapped == []


def test_an_engine_is_mapped_as_it_is_filled_and_the_one_before_unmapped_afterwards(
    mapped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapping: list[Future[None]] = []
    monkeypatch.setattr(device_staging, "on_daemon", lambda *args: unmapping.append(on_daemon(*args)))
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(cuda, "copy", lambda live, _, nbytes, stream: copied.append((live, nbytes)))
    staging = device_staging.DeviceStaging(plan_of(3), 0, None, ())

    def fill() -> None:
        assert staging.flat
        for first in (0, 8):
            staging.flat.load(torch.arange(8, dtype=torch.uint8), first)

    staging.link(exported("a", "b"))
    assert mapped == []
    fill()
    assert mapped == ["a", "b"]
    staging.forget_engine()
    assert staging.flat is None
    staging.link(exported("c", "d"))
    fill()
    assert mapped == ["a", "b", "c", "d"]
    assert copied == [(1000, 8), (2000, 8), (3000, 8), (4000, 8)]
    for _ in range(2):
        staging.unmap_forgotten()
    (ended,) = unmapping
    ended.result(patient(10))
    assert mapped == ["c", "d"]
    staging.link(None)
    assert mapped == []
    staging.link(exported("e", "f"))
    fill()
    staging.forget_engine()
    staging.close()
    assert mapped == []


def test_an_allocation_is_mapped_once_for_all_its_tensors_when_one_is_used(mapped: list[str]) -> None:
    at = {"a": (b"one", 4, 3), "b": (b"two", 0, 2), "c": (b"one", 9, 5)}
    handles = {
        name: DeviceHandle("cuda:0", 1, ipc, offset, nbytes) for name, (ipc, offset, nbytes) in at.items()
    }
    memory = device.MappedTensors(DeviceMemory.of(handles))
    assert memory.nbytes == {"a": 3, "b": 2, "c": 5}
    assert mapped == []
    assert memory.address("c") == 1009
    assert mapped == ["one"]
    assert memory.addresses() == {"a": 1004, "b": 2000, "c": 1009}
    assert {name: each.tolist() for name, each in memory.items()} == {
        name: [*range(offset, offset + nbytes)] for name, (_, offset, nbytes) in at.items()
    }
    memory.close()
    memory.close()
    assert mapped == []
    elsewhere = DeviceHandle("cuda:1", 7, b"three", 0, 1)
    with pytest.raises(TransportError, match="process 7 has memory on cuda:1, this process is on cuda:0"):
        device.MappedTensors(DeviceMemory.of(handles | {"d": elsewhere}))
    assert mapped == []


def test_memory_that_is_mapped_ahead_is_linked_and_other_memory_let_go_of(mapped: list[str]) -> None:
    staging = device_staging.DeviceStaging(plan_of(3), 0, None, ())
    staging.map_ahead(exported("a", "b").memory)
    staging.link(exported("a", "b"))
    assert staging.flat
    assert staging.target["b"].tolist() == [*range(8)]
    assert mapped == ["a", "b"], "each is mapped once"
    staging.forget_engine()
    staging.map_ahead(exported("c").memory)
    staging.link(exported("d"))
    assert staging.target["d"].tolist() == [*range(8)]
    assert sorted(mapped) == ["a", "b", "d"]
    for engine in (None, exported("e")):
        staging.forget_engine()
        staging.map_ahead(exported("e").memory)
        staging.link(engine)
    staging.map_ahead(exported("f").memory)
    staging.close()
    assert mapped == []


def test_what_uses_or_closes_memory_that_is_mapped_ahead_waits_for_the_mapping(
    monkeypatch: pytest.MonkeyPatch, mapped: list[str]
) -> None:
    open_handle, begun, go_on = cuda.open_handle, threading.Event(), threading.Event()

    def slow(ipc: bytes) -> int:
        begun.set()
        assert go_on.wait(patient(10))
        return open_handle(ipc)

    monkeypatch.setattr(cuda, "open_handle", slow)
    memory = device.MappedTensors(exported("a", "b").memory)
    memory.map_ahead()
    assert begun.wait(patient(10))
    using = on_daemon(lambda: (memory.address("a"), *mapped))
    go_on.set()
    assert using.result(patient(10)) == (1000, "a", "b")
    memory.close()
    begun.clear()
    go_on.clear()
    memory = device.MappedTensors(exported("a", "b").memory)
    memory.map_ahead()
    assert begun.wait(patient(10))
    ending = on_daemon(memory.close)
    go_on.set()
    ending.result(patient(10))
    assert mapped == []


def test_what_cannot_be_mapped_ahead_fails_what_uses_it(mapped: list[str]) -> None:
    memory = device.MappedTensors(exported("a", "gone").memory)
    memory.map_ahead()
    assert memory.address("a") == 1000
    with pytest.raises(TransportError, match="gone"):
        memory.address("gone")
    memory.close()
    assert mapped == []


def test_slots_that_were_taken_before_memory_ran_out_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left = ["a"]

    class Taken:
        @classmethod
        def create(cls, nbytes: int) -> Taken:
            if not left:
                raise TransportError("cannot take it")
            left.pop()
            return cls()

        def close(self) -> None:
            left.append("a")

    monkeypatch.setattr(device_staging, "DeviceBuffer", Taken)
    with pytest.raises(TransportError):
        device_staging.take_slots(plan_of(3), ())
    assert left == ["a"]


def test_empty_tensors_do_not_keep_others_from_being_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(addresses: Iterable[int]) -> dict[int, tuple[bytes, int]]:
        held = [*addresses]
        assert 0 not in held, "it is no memory of a device"
        return {address: (b"ipc", address % 512) for address in held}

    monkeypatch.setattr(device.cuda, "export", export)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    live = {"weight": torch.zeros(8, 3), "bias": torch.zeros(8), "none": torch.zeros(0, 4)}
    handles = device.export_tensors(live).handles()
    assert {name: each.nbytes for name, each in handles.items()} == {"weight": 96, "bias": 32}
    assert handles["bias"].offset == live["bias"].data_ptr() % 512
    assert device.export_tensors({"none": live["none"]}).handles() == {}


def test_each_allocation_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def allocation(address: int) -> tuple[int, int]:
        asked.append(address)
        return address // 100 * 100, 100

    monkeypatch.setattr(device.cuda, "allocation", allocation)
    monkeypatch.setattr(device.cuda, "ipc_handle", lambda base: str(base).encode())
    found = device.cuda.export([350, 120, 199, 100, 200, 350])
    assert found == {
        100: (b"100", 0), 120: (b"100", 20), 199: (b"100", 99), 200: (b"200", 0), 350: (b"300", 50)
    }  # fmt: skip
    assert asked == [100, 200, 350]


def test_sharded_weights_are_read_without_their_graph_of_gradients(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        live = [local_tensor(tensor) for tensor in named_tensors(model)[0].values()]
        assert len(live) == 2
        assert not any(tensor.requires_grad for tensor in live)
    finally:
        torch.distributed.destroy_process_group()


def test_connecting_may_take_longer_than_an_update() -> None:
    timeout_s = patient(0.5)

    async def work(loop: Loop) -> None:
        holder = loop.holders[1]
        join = holder.join

        def late(*args: object) -> None:
            time.sleep(timeout_s + 0.5)
            join(*args)

        holder.join = late
        await loop.controller.connect()
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=timeout_s, connect_timeout_s=patient(20)))
