"""Metrics of updates and heals: gauges, counters and histograms of `ray.util.metrics`.

Ray exports metrics on the nodes' Prometheus endpoints, under these names prefixed with ``ray_``.
`dashboards/grafana.json` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from weightsync.errors import WeightSyncError
from weightsync.plan import Cluster, Plan
from weightsync.report import HealReport, SyncReport, is_direct

# Ray computes a histogram's sum from buckets, so narrow buckets make sums and quantiles accurate.
_SECONDS = [step * 10.0**power for power in range(-4, 3) for step in (1, 1.5, 2, 3, 5, 7)]


class Metrics:
    """Records the reports of `WeightSync`. A value takes a microsecond or two."""

    def __init__(self, cluster: Cluster | None) -> None:
        """`cluster`: bandwidths for the floor of broadcasts; None if unknown."""
        self._cluster, self._floor = cluster, (0, 0.0)
        engine, phase = ("engine",), ("phase",)
        self._versions = Gauge(
            "weightsync_engine_version", "Version that an engine serves, 0 if none", engine
        )
        self._updates = Counter("weightsync_updates_total", "Versions that committed")
        self._failed = Counter("weightsync_failed_updates_total", "Updates that raised an error")
        self._seconds = Histogram("weightsync_update_seconds", "Whole updates", _SECONDS)
        self._phases = Histogram("weightsync_phase_seconds", "Phases of an update", _SECONDS, phase)
        self._moved = Counter("weightsync_update_bytes_total", "Payload of the model, once an update")
        self._speed = Gauge("weightsync_move_bytes_per_second", "Payload over the seconds of moving")
        self._share = Gauge("weightsync_floor_share_ratio", "Floor of a broadcast over the seconds of moving")
        self._failures = Counter("weightsync_engine_failures_total", "Engines that failed", engine + phase)
        self._heals = Counter("weightsync_heals_total", "Engines that came back", engine)
        self._heal_seconds = Histogram("weightsync_heal_seconds", "From failure to serving", _SECONDS, engine)
        self._refills = Counter("weightsync_refills_total", "Heals out of what holders keep", engine)
        self._refilled = Counter("weightsync_refill_bytes_total", "Bytes that heals read", engine)

    def serve(self, versions: Mapping[str, int]) -> None:
        """Record the version that each engine serves; 0 for an engine that left."""
        for engine, version in versions.items():
            self._versions.set(version, {"engine": engine})

    def update(self, report: SyncReport, plan: Plan) -> None:
        """Record an update that committed."""
        self._updates.inc()
        self._seconds.observe(report.seconds)
        for phase, seconds in report.phases.items():
            self._phases.observe(seconds, {"phase": phase})
        if report.nbytes:
            self._moved.inc(report.nbytes)
        self._speed.set(report.gb_per_s * 1e9)
        if floor := self._floor_seconds(report, plan):
            self._share.set(floor / report.phases["move"])
        for engine in report.failures:
            if report.states.get(engine) in (
                "SERVING",
                "PAUSING",
            ):  # it did not pause, so `failure` was not called
                self._failures.inc(tags={"engine": engine, "phase": "pause"})
        self.serve(report.engines)

    def update_failed(self) -> None:
        """Record an update that raised an error."""
        self._failed.inc()

    def failure(self, engine: str, error: WeightSyncError) -> None:
        """Record an engine that failed and stopped serving."""
        self._failures.inc(tags={"engine": engine, "phase": error.where.phase if error.where else "move"})
        self.serve({engine: 0})

    def heal(self, heal: HealReport) -> None:
        """Record a failed engine that came back."""
        tags = {"engine": heal.engine}
        self._heals.inc(tags=tags)
        self.serve({heal.engine: heal.version})
        if heal.serving_at is not None:
            self._heal_seconds.observe(heal.serving_at - heal.died_at, tags)
        if nbytes := sum(heal.bytes_from.values()):
            self._refills.inc(tags=tags)
            self._refilled.inc(nbytes, tags)

    def _floor_seconds(self, report: SyncReport, plan: Plan) -> float:
        """The floor of broadcasts; 0 if unknown or if an engine updates directly."""
        if self._cluster is None or any(map(is_direct, report.routes.values())):
            return 0.0
        if self._floor[0] != report.epoch:
            self._floor = report.epoch, plan.explain(self._cluster).floor_seconds or 0.0
        return self._floor[1]
