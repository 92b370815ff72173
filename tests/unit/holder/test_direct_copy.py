"""Direct copies are cut into groups, with digests beside those that come by a link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.holder import direct_copy
from weightsync.plan import Reads
from weightsync.protocol.handles import DeviceHandle

GPU = "cuda:GPU-1"


def reads_of(nbytes: list[int], buffers: list[int]) -> Reads:
    rows = np.ones(len(nbytes), np.int64)
    table = np.stack([rows, rows, rows, np.array(nbytes, np.int64), rows, rows], axis=1)
    zeros = np.zeros(len(nbytes), np.int64)
    return Reads.from_table(zeros, ("w",), zeros, tuple("abc"), np.array(buffers, np.int64), table)


@given(
    most=st.sampled_from([1, 16]),
    parts=st.lists(
        st.lists(st.tuples(st.integers(1, 3 << 30), st.integers(0, 2)), min_size=0, max_size=40),
        min_size=1,
        max_size=2,
    ),
)
def test_groups_are_all_reads_in_order_and_none_after_the_last_writes_a_buffer(
    most: int,
    parts: list[list[tuple[int, int]]],
) -> None:
    reads = [reads_of([n for n, _ in part], [b for _, b in part]) for part in parts]
    groups = [group for number, part in enumerate(reads) for group in direct_copy._groups(number, part, most)]
    for number, part in enumerate(reads):
        its = [group for group in groups if group.part == number]
        assert [group.nth for group in its] == [*range(len(its))]
        assert 1 <= len(its) <= most
        bounds = direct_copy._bounds(number, groups)
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, len(part))
    last = direct_copy._last_groups(reads, groups)
    for number, group in enumerate(groups):
        written = {"abc"[b] for _, b in parts[group.part][group.first : group.end]}
        assert all(last[name] >= number for name in written)
        assert all(name in written for name, found in last.items() if found == number)


@pytest.mark.parametrize(("near", "by_a_link"), [([], True), ([1], True), ([0], False), ([0, 1], False)])
def test_digests_run_beside_copies_that_mostly_come_by_a_link(
    monkeypatch: pytest.MonkeyPatch, near: list[int], *, by_a_link: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(direct_copy, "device_id", lambda _: GPU)
    reads = replace(reads_of([300, 100], [0, 1]), trainer=np.array([0, 1], np.int32))
    devices = {trainer: GPU if trainer in near else "cuda:GPU-2" for trainer in (0, 1)}
    memory = {(trainer, "w"): DeviceHandle(device, 7, b"", 0, 64) for trainer, device in devices.items()}
    assert direct_copy.come_by_a_link([reads, Reads.none()], memory) == by_a_link
