"""A trainer's answer to `publish` is pickled small, and arrives as it was."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.protocol.messages import PublishReport
from weightsync.protocol.timing import Span

words = st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3)


@given(words, words, st.dictionaries(st.text(), st.integers(1)), st.none() | words)
def test_a_report_arrives_as_it_was(
    fingerprint: list[int], frozen: list[int], nonfinite: dict[str, int], agreement: list[int] | None
) -> None:
    spans = [Span("publish", 1.5, 0.25)]
    said = None if agreement is None else np.array(agreement, np.uint64)
    tables = np.array(fingerprint, np.uint64), np.array(frozen, np.uint64)
    sent = PublishReport(*tables, nonfinite, spans, said)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert not buffers, "Ray would carry each beside the answer"
    got = pickle.loads(body)
    assert (got.fingerprint.tolist(), got.frozen.tolist()) == (fingerprint, frozen)
    assert (got.fingerprint.dtype, got.nonfinite, got.spans) == (np.uint64, nonfinite, spans)
    assert (got.agreement if got.agreement is None else got.agreement.tolist()) == agreement
