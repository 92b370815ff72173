"""Figures of broadcasts are worked out in kinds of tensors, as if all pieces were planned."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import World, worlds
from tests.unit.recipes.small_models import SMALL
from weightsync.errors import ConfigError
from weightsync.plan import Cluster, Layout, Members, make_plan
from weightsync.plan.figures.broadcast_figures import explain_broadcast
from weightsync.plan.layout.layout import Bool
from weightsync.recipes.forecast.grids import TrainersGrid, engine_layout
from weightsync.recipes.forecast.parallel import parse_engine, parse_trainers
from weightsync.recipes.forecast.shapes import checkpoint_tensors

CLUSTER = Cluster("two racks", link_gb_per_s=1.0, host_gb_per_s=0.5)


@dataclass
class Listed:
    """A layout with all of its segments."""

    stated: Layout

    @property
    def num_ranks(self) -> int:
        return self.stated.num_ranks

    def of_tensors(self, kept: Bool) -> Layout:
        return self.stated.of_tensors(kept)


@given(worlds(), st.sampled_from([256, 300, 1024, 1 << 20]))
def test_figures_of_any_layouts_are_those_of_the_plan(world: World, bucket_bytes: int) -> None:
    limits = {"bucket_bytes": bucket_bytes, "max_staging_bytes": 1 << 40}
    sides = world.targets(), world.members()
    found = explain_broadcast(Listed(world.source()), *sides, CLUSTER, **limits)
    assert found == make_plan(world.source(), *sides, **limits).explain(CLUSTER)


TRAINERS = ("fsdp=1", "fsdp=5", "fsdp=16", "hsdp=3x2", "hsdp=2x5", "zero=5", "tp=2", "dp=6", "tp=2,pp=3,dp=2")
EXPERT_TRAINERS = ("tp=2,dp=3,ep=6,pp=2", "dp=4,ep=2", "tp=2,dp=2,ep=4,pp=3")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(SMALL)),
    st.sampled_from([*TRAINERS, *EXPERT_TRAINERS]),
    st.integers(256, 40_000),
    st.integers(1, 3),
    st.booleans(),
)
def test_figures_of_models_are_those_of_the_plan(
    name: str, trainers: str, bucket_bytes: int, slots: int, apart: bool
) -> None:
    """Of tensors in layers and experts that are alike, of which some are larger than a bucket."""
    model = SMALL[name]
    parallel = parse_trainers("dp=4" if trainers in EXPERT_TRAINERS and not model.moe else trainers)
    tensors, num_trainers = checkpoint_tensors(model), parallel.num_ranks
    source, engine = (
        TrainersGrid(tensors, model, parallel),
        engine_layout(tensors, model, parse_engine("tp=2")),
    )
    first = num_trainers if apart else 0
    members = Members(max(num_trainers, first + 2), tuple(range(num_trainers)), (("e", (first, first + 1)),))
    limits = {"bucket_bytes": bucket_bytes, "max_staging_bytes": 1 << 40, "slots": slots}
    found = explain_broadcast(source, {"e": engine}, members, CLUSTER, **limits)
    assert found == make_plan(source.whole, {"e": engine}, members, **limits).explain(CLUSTER)


def test_buckets_that_do_not_fit_are_refused_as_by_the_plan() -> None:
    model = SMALL["dense"]
    tensors, members = checkpoint_tensors(model), Members(2, (0, 1), (("e", (0,)),))
    source = TrainersGrid(tensors, model, parse_trainers("fsdp=2"))
    engines = {"e": engine_layout(tensors, model, parse_engine("tp=1"))}
    for limits in (
        {"bucket_bytes": 1024, "max_staging_bytes": 1 << 10},
        {"bucket_bytes": 8, "max_staging_bytes": 64},
    ):
        with pytest.raises(ConfigError) as refused:
            explain_broadcast(source, engines, members, **limits)
        with pytest.raises(ConfigError) as expected:
            make_plan(source.whole, engines, members, **limits)
        assert str(refused.value) == str(expected.value)
