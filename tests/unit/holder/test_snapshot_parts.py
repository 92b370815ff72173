"""Snapshots are page-locked in parts, and no copy to or from a device crosses the border of two."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel_doubles import Runtime, Stream, use_runtime
from weightsync.holder.device_staging import DeviceStaging
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.snapshots import Held, SnapshotStore
from weightsync.protocol.messages import SnapshotHeader

HEADER = SnapshotHeader(1, "layout", 0)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return use_runtime(monkeypatch)


@pytest.fixture
def flat() -> FlatSnapshot:
    live = {name: torch.randint(0, 256, (n,), dtype=torch.uint8) for name, n in (("a", 3000), ("b", 2003))}
    flat = FlatSnapshot(live)
    flat.is_on_device = True  # the double copies host memory as a device's
    return flat


@pytest.fixture
def stores(runtime: Runtime) -> Iterator[list[SnapshotStore]]:
    made = [SnapshotStore(f"holder {number}", "127.0.0.1", "zeromq", "") for number in range(2)]
    yield made
    for each in made:
        each.close()
    assert runtime.locked == {}


def test_own_and_mapped_snapshots_are_copied_both_ways(
    runtime: Runtime, stores: list[SnapshotStore], flat: FlatSnapshot
) -> None:
    saving, mapping = stores
    offer = saving.snapshot(HEADER, np.zeros(1, np.uint64), flat)
    num_locks = len(runtime.locked)
    mapping.mapped.map({0: [offer]})
    assert num_locks > 10
    assert len(runtime.locked) > num_locks + 10
    assert max(runtime.locked.values()) == 512
    wanted = torch.zeros(flat.nbytes, dtype=torch.uint8)
    flat.copy_to(wanted, 0)
    for held in (held_by(saving), held_by(mapping)):
        assert torch.equal(held.bytes, wanted)
        flat.load(torch.zeros_like(wanted), 0)
        flat.load(held.bytes, 0)
        found = torch.zeros_like(wanted)
        flat.save(found)
        assert torch.equal(found, wanted)


def test_a_bucket_is_filled_from_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, stores: list[SnapshotStore], flat: FlatSnapshot
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    stores[0].snapshot(HEADER, np.zeros(1, np.uint64), flat)
    held, slot = held_by(stores[0]).bytes, torch.zeros(4000, dtype=torch.uint8)
    buffer: Any = SimpleNamespace(tensor=slot)
    plan: Any = None  # which the copies of a bucket do not need
    staging = DeviceStaging(plan, 0, None, [buffer])
    staging.load(0, [(7, held[5:2005]), (2100, held[3000:3100])], 1.0)
    assert torch.equal(slot[7:2007], held[5:2005])
    assert torch.equal(slot[2100:2200], held[3000:3100])
    assert not slot[2200:].any()


def held_by(store: SnapshotStore) -> Held:
    held = store.held(HEADER)
    assert held is not None
    return held
