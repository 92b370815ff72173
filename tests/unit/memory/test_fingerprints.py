"""Fingerprints add up as shares do, and differ where tables differ."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weightsync.memory.kernels.fingerprints import fingerprint, publish_report
from weightsync.protocol.messages import Published, combine

WORDS = st.integers(0, 2**64 - 1)


def tables(num_tensors: int, num_ranks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (num_ranks, num_tensors), np.uint64)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_shares_add_up(num_tensors: int, num_ranks: int, seed: int) -> None:
    shares = tables(num_tensors, num_ranks, seed)
    each = fingerprint(shares)
    assert each.shape == (num_ranks, 3)
    assert each.dtype == np.uint64
    np.testing.assert_array_equal(combine([*each]), fingerprint(combine([*shares])))


@given(st.integers(1, 40), WORDS, st.integers(0, 2**31), st.data())
def test_one_tensor_that_differs_always_shows(num_tensors: int, digest: int, seed: int, data) -> None:
    (table,) = tables(num_tensors, 1, seed)
    changed = table.copy()
    changed[data.draw(st.integers(0, num_tensors - 1))] = digest
    same = (fingerprint(changed) == fingerprint(table)).all()
    assert same == (changed == table).all()


@given(st.integers(2, 40), st.integers(0, 2**31), st.data())
def test_exchanged_tensors_show_though_their_sum_is_the_same(num_tensors: int, seed: int, data) -> None:
    (table,) = tables(num_tensors, 1, seed)
    one, other = data.draw(st.permutations(range(num_tensors)))[:2]
    assume(table[one] != table[other])
    changed = table.copy()
    changed[[one, other]] = table[[other, one]]
    differs = fingerprint(changed) != fingerprint(table)
    assert differs.tolist() == [False, True, True]


@given(st.integers(1, 40), st.integers(0, 2**31), st.data())
def test_only_some_tensors_count(num_tensors: int, seed: int, data) -> None:
    (table,) = tables(num_tensors, 1, seed)
    only = data.draw(st.lists(st.integers(0, num_tensors - 1), unique=True))
    rest = np.isin(np.arange(num_tensors), only, invert=True)
    np.testing.assert_array_equal(fingerprint(table, only), fingerprint(np.where(rest, np.uint64(0), table)))


@pytest.mark.parametrize("num_tensors", [1, 5000])
def test_a_report_has_a_few_bytes_however_many_tensors_there_are(num_tensors: int) -> None:
    (table,) = tables(num_tensors, 1, 0)
    report = publish_report(Published(table, {}), [0], ())
    assert len(pickle.dumps(report)) < 1000
    np.testing.assert_array_equal(report.fingerprint, fingerprint(table))
    np.testing.assert_array_equal(report.frozen, fingerprint(table, [0]))
