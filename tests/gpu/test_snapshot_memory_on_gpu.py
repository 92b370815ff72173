"""Snapshots are page-locked in parts: copies cross the borders, and other CUDA calls get through."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.patience import patient
from weightsync.holder.device_staging import DeviceStaging
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.snapshots import SnapshotStore
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.host import PART_NBYTES, SharedBuffer
from weightsync.protocol.messages import SnapshotHeader

pytestmark = pytest.mark.gpu

HEADER = SnapshotHeader(1, "layout", 0)
STEP_NBYTES = 256 << 20
LARGE_NBYTES = 8 << 30
LONGEST_S = 0.5


def random_live() -> dict[str, torch.Tensor]:
    """Return buffers of 2.5 parts, one of which is longer than a part."""
    sizes = {"a": 3, "b": PART_NBYTES + 5, "c": PART_NBYTES, "d": PART_NBYTES // 2}
    return {
        name: torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        for name, nbytes in sizes.items()
    }


def test_copies_of_snapshots_cross_the_borders_of_parts() -> None:
    live = random_live()
    flat, wanted = FlatSnapshot(live), torch.cat([*live.values()])
    saving, mapping = (SnapshotStore(f"holder {number}", "127.0.0.1", "zeromq", "") for number in range(2))
    slot = DeviceBuffer.create(PART_NBYTES + 1000)
    plan: Any = None  # which a bucket's copies do not need
    staging = DeviceStaging(plan, 0, None, [slot])
    with contextlib.closing(saving), contextlib.closing(mapping), contextlib.closing(slot):
        mapping.mapped.map({0: [saving.snapshot(HEADER, np.zeros(1, np.uint64), flat)]})
        for store in (saving, mapping):
            held = store.held(HEADER)
            assert held is not None
            assert torch.equal(held.bytes, wanted.cpu())
            for buffer in live.values():
                buffer.zero_()
            for first in range(0, flat.nbytes, STEP_NBYTES):
                flat.load(held.bytes[first : first + STEP_NBYTES], first)
            torch.cuda.synchronize()
            assert torch.equal(torch.cat([*live.values()]), wanted)
            slot.tensor.zero_()
            torch.cuda.synchronize()
            span = held.bytes[5 : PART_NBYTES + 6]  # longer than a part: there is a border in it
            with staging.queue():
                for pending in staging.load(0, [(7, span)], patient(20)):
                    pending.wait()
            assert torch.equal(slot.tensor[7 : PART_NBYTES + 8], wanted[5 : PART_NBYTES + 6])
        staging.close()


def test_other_calls_get_through_while_memory_is_prepared() -> None:
    made: list[SharedBuffer] = []

    def create() -> None:
        made.append(SharedBuffer.create(LARGE_NBYTES, in_parts=True))

    def map_it() -> None:
        made.append(SharedBuffer.open(made[0].handle))
        made[1].pin(in_parts=True)

    def close() -> None:
        for buffer in made:
            buffer.close()

    longest = {work.__name__: longest_wait(work) for work in (create, map_it, close)}
    assert max(longest.values()) < LONGEST_S, longest


def longest_wait(work: Callable[[], object]) -> float:
    """Return the longest wait for a small copy to the GPU, in s, while `work` runs on another thread."""
    source = torch.ones(1 << 20, dtype=torch.uint8, pin_memory=True)
    target, longest = source.cuda(), 0.0
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        while not working.done():
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            longest = max(longest, time.perf_counter() - begun)
        working.result()
    return longest
