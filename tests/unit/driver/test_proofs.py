"""What a report says was compared of each engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from weightsync.config import SyncConfig
from weightsync.driver.verifying.comparison import Comparison
from weightsync.driver.verifying.live_digests import LiveDigests
from weightsync.protocol.messages import LiveDigest, LoadReport

EXPECTED = np.arange(3, dtype=np.uint64)
LIVE = [LiveDigest("kind", "digest")]


def report(**flags: bool) -> LoadReport:
    live = [] if flags.get("are_live") else LIVE
    return LoadReport(EXPECTED, (), live, **{"are_live": False, **flags})


def proofs(**reports: LoadReport) -> dict[str, str]:
    nobody: Any = None  # asked only if something differs
    comparison = Comparison(SyncConfig(), nobody, nobody, LiveDigests())
    asyncio.run(comparison.wrong(nobody, reports, EXPECTED))
    return comparison.proofs


@pytest.mark.parametrize(
    ("flags", "alone", "with_another"),
    [
        ({"are_live": True}, "live weights", "live weights"),
        (
            {},
            "what its loader got; no engine is alike",
            "what its loader got, and live weights with 1 engine alike",
        ),
        (
            {"are_compared": True},
            "live weights with what was quantised",
            "live weights with what was quantised and with 1 engine alike",
        ),
    ],
)
def test_a_proof_names_what_was_compared(flags: dict[str, bool], alone: str, with_another: str) -> None:
    assert proofs(a=report(**flags)) == {"a": alone}
    assert proofs(a=report(**flags), b=report(**flags)) == {"a": with_another, "b": with_another}


def test_an_engine_that_tells_no_live_digest_has_its_input_compared() -> None:
    assert proofs(a=LoadReport(EXPECTED, (), [None], are_live=False)) == {"a": "what its loader got"}
