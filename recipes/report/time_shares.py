"""Splits the time of an update into the floor, the rest of the load, and other phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsync.driver.connecting.traffic import floors
from weightsync.protocol.timing import seconds_of
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.report.run_report import RunReport
from weightsync.text import time_text

ON_CPUS = "this fleet ran on CPUs: comparing it with the floors of {} means nothing"


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of one update's time. `floor_s`, the rest of `written_s` and `beside` are the whole call.

    Attributes:
        floor_s: the least seconds that the links allow; 0 if their rates were not given.
        written_s: seconds of ``load`` of the slowest engine rank, until it had all bytes.
        beside: all other seconds, by the driver's phases. That rank's digests are in ``verify``, where the
            driver has them in ``move``.
    """

    floor_s: float
    written_s: float
    beside: Mapping[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of the bar, in order: ``floor``, ``load`` without the floor, and phases."""
        parts = {"floor": self.floor_s, "load": self.written_s - self.floor_s, **self.beside}
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def bar(self, width: int) -> str:
        """Return `width` characters: the floor, the rest of the load, and other phases."""
        whole = sum(self.parts.values())
        ends = [round(width * seconds / whole) for seconds in (self.floor_s, self.written_s)]
        return "█" * ends[0] + "▓" * (ends[1] - ends[0]) + "░" * (width - ends[1])

    def __str__(self) -> str:
        least = f"floor {time_text(self.floor_s)}, " if self.floor_s else ""
        phases = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in self.beside.items())
        beside = time_text(sum(self.beside.values()))
        return f"{least}written in {time_text(self.written_s)}; beside it {beside}: {phases}"


def last_update(report: RunReport, cluster: tuple[str, HostSpec] | None = None) -> TimeShares | None:
    """Return the shares of a run's last update, or None if the report has no spans.

    Args:
        cluster: name and rates of the hosts, for the floor of the slowest engine rank.
    """
    ranks = [
        (seconds_of(spans, "load"), seconds_of(spans, "verify"))
        for process, spans in report.spans.items()
        if process.startswith("engine ")
    ]
    if not ranks or not report.steps or not any(report.steps[-1].phases.values()):
        return None
    load_s, digest_s = max(ranks, key=sum)
    beside = dict(report.steps[-1].phases)
    move_s = beside.get("move", 0.0)
    written_s = min(load_s, move_s)  # a rank first waits for the holder
    digest_s = min(digest_s, move_s - written_s)
    beside["move"] = move_s - written_s - digest_s
    beside["verify"] = beside.get("verify", 0.0) + digest_s
    least_s = 0.0
    if cluster and report.links:
        rates = cluster[1].link_rates(cluster[0])
        least_s = max(floors(report.links, rates, gpus_per_host=cluster[1].gpus_per_host).values())
    return TimeShares(min(least_s, written_s), written_s, beside)
