"""What is told to Prometheus, and that the dashboard asks for the same names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightsync.actors.ray.metrics
from tests.unit.plan.test_plan_explain import rows_plan
from tests.unit.test_report import REPORT
from weightsync.actors.ray.metrics import Metrics
from weightsync.errors import EngineError, Where
from weightsync.plan import Cluster, Plan
from weightsync.report import HealReport

DASHBOARD = Path(weightsync.actors.ray.metrics.__file__).parents[1] / "dashboards" / "grafana.json"
Told = dict[tuple[str, ...], list[float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The values that each metric was told, by its name and tags."""
    values: Told = {}

    class Metric:
        def __init__(self, name: str, description: str, *rest: Any) -> None:
            assert description
            self._name, self._tags = name, rest[-1] if rest and isinstance(rest[-1], tuple) else ()

        def _tell(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self._tags)
            values.setdefault((self._name, *(tags or {}).values()), []).append(value)

        set = observe = inc = _tell

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(weightsync.actors.ray.metrics, kind, Metric)
    return values


@pytest.fixture
def plan() -> Plan:
    """One trainer on holder 0, one engine on holder 1."""
    return rows_plan((1024, 1024), 1, 1 << 18, (1,))


def test_an_update_tells_its_phases_bytes_and_versions(told: Told, plan: Plan) -> None:
    Metrics(None).update(REPORT, plan)
    assert told["weightsync_updates_total",] == [1.0]
    assert told["weightsync_update_seconds",] == [0.5]
    assert told["weightsync_phase_seconds", "publish"] == [0.1]
    assert told["weightsync_phase_seconds", "move"] == [0.2]
    assert told["weightsync_update_bytes_total",] == [16_400_000_000]
    assert told["weightsync_move_bytes_per_second",] == [pytest.approx(82e9)]
    assert [told["weightsync_engine_version", engine] for engine in ("e0", "e2")] == [[7], [6]]
    assert ("weightsync_floor_share_ratio",) not in told


def test_the_share_of_the_floor_is_told_where_links_are_known(told: Told, plan: Plan) -> None:
    metrics = Metrics(Cluster("two", link_gb_per_s=1.0))
    floor = plan.explain(Cluster("two", link_gb_per_s=1.0)).floor_seconds
    assert floor is not None
    metrics.update(replace(REPORT, phases={"move": 2 * floor}), plan)
    metrics.update(replace(REPORT, routes={"e0": "direct"}), plan)
    assert told["weightsync_floor_share_ratio",] == [pytest.approx(0.5)]


def test_failures_and_heals_are_told_by_engine(told: Told, plan: Plan) -> None:
    metrics = Metrics(None)
    error = EngineError("e2", "load", "out of memory")
    error.where = Where("e2", None, 7, "move")
    metrics.failure("e2", error)
    metrics.update_failed()
    metrics.heal(
        HealReport(
            engine="e2",
            cause="out of memory",
            version=7,
            died_at=100.0,
            respawned_at=None,
            serving_at=102.5,
            bytes_from={"holder 0": 30, "holder 1": 10},
            ways={},
            gb_per_s=1.0,
            verified=True,
        )
    )
    assert told == {
        ("weightsync_engine_failures_total", "e2", "move"): [1.0],
        ("weightsync_engine_version", "e2"): [0, 7],
        ("weightsync_failed_updates_total",): [1.0],
        ("weightsync_heals_total", "e2"): [1.0],
        ("weightsync_heal_seconds", "e2"): [2.5],
        ("weightsync_refills_total", "e2"): [1.0],
        ("weightsync_refill_bytes_total", "e2"): [40],
    }


def test_who_was_not_paused_in_time_is_told_although_it_serves_on(told: Told, plan: Plan) -> None:
    Metrics(None).update(replace(REPORT, states={"e2": "SERVING"}), plan)
    assert told["weightsync_engine_failures_total", "e2", "pause"] == [1.0]


def test_the_dashboard_shows_every_metric_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = set()

    def export(kind: str) -> Any:
        def make(name: str, *_: object) -> None:
            exported.add(f"ray_{name}" + ("_bucket" if kind == "Histogram" else ""))
            assert name.endswith("_total") is (kind == "Counter")

        return make

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(weightsync.actors.ray.metrics, kind, export(kind))
    Metrics(None)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"\bray_\w+", query)} == exported
    assert all(query.count("(") == query.count(")") for query in queries)
