"""A holder maps memory before the plan is made, and says why that fails."""

from __future__ import annotations

import pytest

from weightsync.errors import TransportError
from weightsync.holder import mapped_trainers
from weightsync.holder.holder import Holder
from weightsync.protocol.handles import DeviceHandle

GPU = "cuda:GPU-1"


def handle(ipc: bytes) -> DeviceHandle:
    return DeviceHandle(GPU, 7, ipc, 0, 64)


class Device:
    """Memory that can be mapped under the handle ``good``, and read at ``good`` only."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.readable = True

    def open(self, handle: DeviceHandle) -> Device:
        if handle.ipc != b"good":
            raise TransportError("no peer access")
        self.calls.append("map")
        return self

    address = 4096

    def touch(self, starts: list[int]) -> None:
        assert starts == [self.address]
        self.calls.append("read")
        if not self.readable:
            raise TransportError("no kernel")

    def close(self) -> None:
        self.calls.append("unmap")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(mapped_trainers, "PeerMemory", made.open)
    monkeypatch.setattr(mapped_trainers, "touch", made.touch)
    return made


def test_each_is_mapped_read_and_unmapped(device: Device) -> None:
    memory = {"trainer 0": handle(b"good"), "trainer 1": handle(b"good")}
    assert mapped_trainers.try_mapping(memory) == ""
    assert device.calls == ["map", "read", "unmap"] * 2


def test_buffers_of_one_allocation_are_mapped_once(device: Device) -> None:
    memory = {(0, name): DeviceHandle(GPU, 7, b"good", at, 8) for name, at in (("a", 0), ("b", 64))}
    mapped = mapped_trainers.MappedTrainers(memory)
    assert mapped.starts == {(0, "a"): 4096, (0, "b"): 4160}
    mapped.close()
    assert device.calls == ["map", "unmap"]


def test_the_first_that_fails_is_named_and_nothing_stays_mapped(device: Device) -> None:
    memory = {"trainer 0": handle(b"good"), "trainer 1": handle(b"bad"), "trainer 2": handle(b"good")}
    assert mapped_trainers.try_mapping(memory) == "trainer 1: no peer access"
    device.readable = False
    assert mapped_trainers.try_mapping(memory) == "trainer 0: no kernel"
    assert device.calls == ["map", "read", "unmap"] * 2


def test_a_holder_says_its_name_and_one_in_host_memory_maps_nothing(device: Device) -> None:
    holder = Holder("holder 3", "127.0.0.1", device=GPU)
    assert holder.try_mapping({"trainer 0": handle(b"good")}) == ""
    wanted = "holder 3 cannot map the memory of trainer 0: no peer access"
    assert holder.try_mapping({"trainer 0": handle(b"bad")}) == wanted
    on_host = Holder("holder 4", "127.0.0.1")
    assert on_host.try_mapping({"trainer 0": handle(b"good")}) == "holder 4 has its buckets in host memory"
    assert device.calls == ["map", "read", "unmap"]
