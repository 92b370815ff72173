"""Equal reads of a host's ranks are found, whatever their codes and however many ranks there are."""

from __future__ import annotations

from unittest import mock

import numpy as np

from tests.shuffle_cases import reads_of
from weightsync.plan.cross_host import host_bundles
from weightsync.plan.cross_host.host_bundles import HostBundles

MIB = 1 << 20


def test_reads_whose_codes_are_equal_are_told_apart() -> None:
    reads = reads_of([1 << 10] * 32)
    needs = [reads, reads.take(np.arange(0, 32, 3)), reads.take(np.arange(31, -1, -2))]
    with mock.patch.object(host_bundles, "row_codes", lambda columns: np.zeros(len(columns[0]), np.uint64)):
        made = HostBundles.of(needs)
    known = HostBundles.of(needs)
    assert made.orders == known.orders
    assert made.count.tolist() == known.count.tolist()
    assert [rows.tolist() for rows in made.rows] == [rows.tolist() for rows in known.rows]


def test_places_are_many() -> None:
    reads = reads_of([MIB])
    made = HostBundles.of([reads] * 150)
    assert [sorted(order) for order in made.orders] == [[*range(150)]]
    assert {len(order) for order in HostBundles.of([reads, *[reads_of([MIB] * 2)] * 149]).orders} == {
        149,
        150,
    }
