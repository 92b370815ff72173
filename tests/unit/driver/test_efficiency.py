"""Floors of ranks, and the share of them that an update reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.test_report import REPORT
from weightsync import LinkRates, efficiency
from weightsync.protocol.timing import Span
from weightsync.report import Link, SyncReport

RATES = LinkRates(name="h200", hbm=4000, nvlink=400, nic=50)


def of(**spans: list[Span]) -> SyncReport:
    return replace(REPORT, spans={name.replace("_", " "): each for name, each in spans.items()})


@pytest.mark.parametrize(
    ("distance", "floor_s"), [("same GPU or slot", 2e-3), ("same host", 1e-2), ("other host", 1e-2)]
)
def test_the_slowest_link_of_a_rank_is_its_floor(distance: str, floor_s: float) -> None:
    links = [Link("trainer 0", "r", distance, 4_000_000_000), Link("trainer 1", "r", "same host", 1_000_000)]
    (share,) = efficiency(links, of(r=[Span("load", 0.0, 0.1), Span("verify", 0.1, 0.5)]), RATES)
    assert share.floor_s == pytest.approx(floor_s, rel=2e-3)
    assert share.efficiency == pytest.approx(floor_s / 0.1, rel=2e-3)


def test_a_line_says_what_was_taken_and_how_near_it_came() -> None:
    links = [
        Link("trainer 0", "engine e0 rank 0", "same host", 1 << 30),
        Link("t", "other", "same host", 16 << 20),
    ]
    lines = [*map(str, efficiency(links, of(engine_e0_rank_0=[Span("load", 0.0, 3e-3)]), RATES))]
    assert lines == [
        "engine e0 rank 0: 1.07 GB, floor 2.7 ms, took 3.0 ms, 89% of what is possible",
        "other: 16.8 MB, floor 42 µs, took no part",
    ]
