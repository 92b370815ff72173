"""Handles in columns: what they give back, and which of them a read needs."""

from __future__ import annotations

import dataclasses
import pickle

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, RankLayout, Reads, Segment
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory, RankMemory, read_handles
from weightsync.protocol.handles import DeviceHandle


def fields(memory: DeviceMemory) -> tuple[object, ...]:
    return tuple(getattr(memory, field.name) for field in dataclasses.fields(memory))


HANDLES = st.builds(
    DeviceHandle,
    st.sampled_from(["cuda:GPU-1", "cuda:GPU-2"]),
    st.integers(1, 2),
    st.sampled_from([b"one", b"another"]),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)


@given(st.dictionaries(st.text(max_size=4), HANDLES, max_size=8))
def test_columns_give_the_handles_back_in_their_order(handles: dict[str, DeviceHandle]) -> None:
    sent = pickle.loads(pickle.dumps(DeviceMemory.of(handles), protocol=5))
    assert [*sent.handles().items()] == [*handles.items()]
    allocations = {(each.device, each.pid, each.ipc) for each in handles.values()}
    assert len(sent.ipc) == sum(len(ipc) for _, _, ipc in allocations)
    assert len(sent.owners) == len({allocation[:2] for allocation in allocations})


def test_an_export_is_whole_again_where_its_layout_and_its_memory_meet() -> None:
    layout = RankLayout((), (Segment("w", Box((0,), (4,)), "live", 0, (4,)),), device="cuda:GPU-1")
    handles = {"live": DeviceHandle("cuda:GPU-1", 7, b"ipc", 512, 16)}
    table = LayoutTable.of(layout)
    export = RankMemory(table.own(), DeviceMemory.of(handles)).export(table)
    assert (export.layout, export.memory.handles()) == (layout, handles)


@given(st.lists(HANDLES, min_size=1, max_size=8))
def test_the_first_handle_is_that_of_the_first_buffer(handles: list[DeviceHandle]) -> None:
    assert DeviceMemory.of(dict(zip("hgfedcba", handles, strict=False))).first() == handles[0]


@given(st.dictionaries(st.text(max_size=4), HANDLES, max_size=8))
def test_a_process_states_its_memory_as_it_would_by_its_handles(handles: dict[str, DeviceHandle]) -> None:
    ours = {name: msgspec.structs.replace(each, device="cuda:GPU-1", pid=7) for name, each in handles.items()}
    places = [(each.ipc, each.offset) for each in ours.values()]
    stated = DeviceMemory.of_process("cuda:GPU-1", 7, ours, places, [each.nbytes for each in ours.values()])
    assert fields(stated) == fields(DeviceMemory.of(ours))
    assert stated.handles() == ours


def test_reads_need_the_buffers_that_they_name_at_each_trainer_and_no_others() -> None:
    def handle(trainer: int, name: str) -> DeviceHandle:
        return DeviceHandle("cuda:GPU-1", trainer, name.encode(), 0, 16)

    memory = {
        trainer: DeviceMemory.of({name: handle(trainer, name) for name in ("a", "b", "c")})
        for trainer in (1, 3)
    }
    numbers = np.zeros((3, 6), np.int64)
    reads = Reads.from_table(
        np.array([3, 1, 3]), ("b", "c", "a"), np.array([0, 2, 0]), ("live",), np.zeros(3, np.int64), numbers
    )
    wanted = {(1, "a"): handle(1, "a"), (3, "b"): handle(3, "b")}
    assert read_handles([reads], memory) == wanted
    assert read_handles([reads, reads], memory) == wanted
