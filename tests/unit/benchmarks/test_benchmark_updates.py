"""What a row says besides seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import updates
from benchmarks.updates import Round, floor
from weightsync import SyncReport
from weightsync.plan.figures.estimate import LinkRates
from weightsync.report import Link


def report(**phases: float) -> SyncReport:
    return SyncReport(
        version=1,
        nbytes=1,
        seconds=1.0,
        phases=phases,
        verified=True,
        engines={},
        states={},
        failures={},
        digest="",
        num_buckets=0,
        epoch=1,
        connect_phases={},
    )


def test_the_floor_is_of_the_slowest_link_of_the_rank_that_takes_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = LinkRates(name="any", hbm=4800, nvlink=374, nic=50)
    monkeypatch.setattr(updates, "measured_rates", lambda: rates)
    links = [
        Link("trainer 0", "engine e rank 0", "same GPU or slot", 2_400_000_000),
        Link("trainer 1", "engine e rank 0", "same host", 374_000_000),
        Link("trainer 0", "engine e rank 1", "same host", 187_000_000),
    ]
    # Memory: what it has of its own GPU is read and written, what comes from the other only written.
    wanted_ms = (2 * 2.4 + 0.374) / 4.8
    rounds = [Round(n, 1.0, report(publish=1.0, pause=0.001, move=0.003, verify=0.001)) for n in (1, 2)]
    assert floor(links, rounds) == {
        "floor ms": pytest.approx(wanted_ms),
        "share": pytest.approx(wanted_ms / 5),
        "memory GB/s": 4800,
        "NVLink GB/s": 374,
    }
    links[0] = Link("trainer 0", "engine e rank 0", "same GPU or slot", 0)
    assert floor(links, rounds)["floor ms"] == pytest.approx(1.0)
    assert "NVLink GB/s" not in floor([replace(link, distance="same GPU or slot") for link in links], rounds)
