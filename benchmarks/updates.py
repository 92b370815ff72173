"""Timed rounds of `update_weights` over a fleet, checked byte by byte outside the clock."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu_fleet import Fleet
from benchmarks.gpu_rates import measured_rates
from benchmarks.isolate import stage
from weightsync import SyncConfig, SyncReport, WeightSync
from weightsync.driver.connecting.traffic import efficiency
from weightsync.report import Link

__all__ = [
    "MODES",
    "NUM_WARM",
    "PHASES",
    "Mode",
    "WrongWeightsError",
    "applied",
    "check",
    "config",
    "connect",
    "floor",
    "new_version",
    "spread",
    "timed_rounds",
    "update_row",
]

PHASES = ("publish", "pause", "move", "verify", "commit")
_APPLIED = ("pause", "move", "verify")
NUM_WARM = 2
"""Warm-up rounds, which are not measured."""

_versions = itertools.count(1)

Mode = Literal["auto", "broadcast"]
MODES: tuple[Mode, ...] = ("auto", "broadcast")


class WrongWeightsError(RuntimeError):
    """The destination does not hold the sent bytes."""


@dataclass(frozen=True, slots=True)
class Round:
    """One timed update: the number from 1 on, the caller's seconds, and the report."""

    number: int
    seconds: float
    report: SyncReport


def new_version() -> int:
    """Return a version greater than all before, so that every round writes other bytes."""
    return next(_versions)


def config(bucket_mib: int, num_slots: int, mode: Mode = "auto", keep_versions: int = 1) -> SyncConfig:
    """Return a config with these buckets and wide limits.

    By default holders store no snapshots. They would copy snapshots between updates, untimed, and page-lock
    as much host memory when they connect.
    """
    return SyncConfig(
        mode=mode,
        keep_versions=keep_versions,
        bucket_bytes=bucket_mib << 20,
        num_slots=num_slots,
        max_staging_bytes=16 << 30,
        timeout_s=60,
        connect_timeout_s=120,
    )


def connect(sync: WeightSync) -> None:
    """Connect, and report each finished phase as a stage."""
    stage("connecting")
    clock, shown = logging.getLogger("weightsync.protocol.timing"), _Stages()
    clock.addHandler(shown)
    clock.setLevel(logging.DEBUG)
    try:
        sync.connect()
    finally:  # logging would cost updates time
        clock.setLevel(logging.NOTSET)
        clock.removeHandler(shown)


class _Stages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        stage(f"connecting: {record.getMessage()}")


def check(wrong: int, name: str, version: int) -> None:
    """Raise `WrongWeightsError` if any element differs."""
    if wrong:
        raise WrongWeightsError(f"{name}: {wrong} elements are not those of version {version}")


def timed_rounds(
    sync: WeightSync, fleet: Fleet, num_rounds: int, num_warm: int = NUM_WARM
) -> Iterator[Round]:
    """Poison, update and compare repeatedly. Yields the rounds after the first `num_warm`."""
    for number in range(1 - num_warm, num_rounds + 1):
        version = new_version()
        stage(f"round {number}: other values")
        fleet.prepare(version)
        stage(f"round {number}: update")
        started = time.perf_counter()
        report = sync.update_weights(version)
        seconds = time.perf_counter() - started
        stage(f"round {number}: {seconds * 1e3:.1f} ms; comparing")
        check(fleet.wrong(version), "ours", version)
        if number > 0:
            yield Round(number, seconds, report)


def update_row(rounds: Sequence[Round]) -> dict[str, object]:
    """Summarise rounds: the update's median, range and samples, phases, rate, and the last report."""
    total, reports = [each.seconds for each in rounds], [each.report for each in rounds]
    row: dict[str, object] = spread("total", total)
    row |= applied(reports)
    for phase in PHASES:
        row[f"{phase} ms"] = statistics.median(report.phases.get(phase, 0.0) for report in reports) * 1e3
    row["GB"] = reports[0].nbytes / 1e9
    row["GB/s"] = reports[0].nbytes / statistics.median(total) / 1e9
    row["buckets"] = reports[0].num_buckets
    row["route"] = ", ".join(sorted(set(reports[0].routes.values())))
    row["last report"] = reports[-1].to_dict()
    return row


def applied(reports: Sequence[SyncReport]) -> dict[str, object]:
    """Return the time from published to verified on every rank: median, range and samples."""
    return spread("applied", [sum(report.phases.get(phase, 0.0) for phase in _APPLIED) for report in reports])


def floor(links: Sequence[Link], rounds: Sequence[Round]) -> dict[str, object]:
    """Return the floor of the slowest rank, the ratio to ``applied``, and the rates of the links.

    The floor is the rank's bytes over the rates of the rank's links. Needs a GPU.
    """
    rates = measured_rates()
    reports = [each.report for each in rounds]
    seconds = max(each.floor_s for each in efficiency(links, reports[-1], rates))
    crosses = any(link.nbytes and link.distance == "same host" for link in links)
    return {
        "floor ms": seconds * 1e3,
        "share": seconds * 1e3 / float(str(applied(reports)["applied ms"])),
        "memory GB/s": rates.hbm,
        **({"NVLink GB/s": rates.nvlink} if crosses else {}),
    }


def spread(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Return median and range in milliseconds, and every sample."""
    kept = [second * 1e3 for second in seconds]
    return {
        f"{name} ms": statistics.median(kept),
        f"{name} range": f"{min(kept):.1f}-{max(kept):.1f}",
        f"{name} samples ms": kept,
    }
