"""Timed rounds of `update_weights` over a fleet, checked byte by byte outside the clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu_fleet import Fleet
from weightsync import SyncConfig, SyncReport, WeightSync

__all__ = [
    "MODES",
    "PHASES",
    "Mode",
    "WrongWeightsError",
    "applied",
    "check",
    "config",
    "new_version",
    "spread",
    "timed_rounds",
    "update_row",
]

PHASES = ("publish", "pause", "move", "verify", "commit")
_APPLIED = ("pause", "move", "verify")

_versions = itertools.count(1)

Mode = Literal["auto", "broadcast"]
MODES: tuple[Mode, ...] = ("auto", "broadcast")


class WrongWeightsError(RuntimeError):
    """The destination does not hold what was sent."""


@dataclass(frozen=True, slots=True)
class Round:
    """One timed update: its number from 1 on, the caller's seconds, and the report."""

    number: int
    seconds: float
    report: SyncReport


def new_version() -> int:
    """Greater than all before it in this process, so that each round writes other bytes."""
    return next(_versions)


def config(bucket_mib: int, num_slots: int, mode: Mode = "auto") -> SyncConfig:
    """Buckets as asked; limits wide enough for the largest of them."""
    return SyncConfig(
        mode=mode,
        bucket_bytes=bucket_mib << 20,
        num_slots=num_slots,
        max_staging_bytes=16 << 30,
        timeout_s=60,
        connect_timeout_s=120,
    )


def check(wrong: int, who: str, version: int) -> None:
    """Raise `WrongWeightsError` when any element differs."""
    if wrong:
        raise WrongWeightsError(f"{who}: {wrong} elements are not those of version {version}")


def timed_rounds(sync: WeightSync, fleet: Fleet, num_rounds: int, num_warm: int = 2) -> Iterator[Round]:
    """Poison, update, compare, again and again; the rounds after the first `num_warm`."""
    for number in range(1 - num_warm, num_rounds + 1):
        version = new_version()
        fleet.prepare(version)
        started = time.perf_counter()
        report = sync.update_weights(version)
        seconds = time.perf_counter() - started
        check(fleet.wrong(version), "ours", version)
        if number > 0:
            yield Round(number, seconds, report)


def update_row(rounds: Sequence[Round]) -> dict[str, object]:
    """Over all rounds: the whole update, its range and samples, phases and rate; and the last report."""
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
    """From published to applied on every rank, and verified there: median, range and samples."""
    return spread("applied", [sum(report.phases.get(phase, 0.0) for phase in _APPLIED) for report in reports])


def spread(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Median and range in milliseconds, and every sample."""
    kept = [second * 1e3 for second in seconds]
    return {
        f"{name} ms": statistics.median(kept),
        f"{name} range": f"{min(kept):.1f}-{max(kept):.1f}",
        f"{name} samples ms": kept,
    }
