"""What engine ranks read is worked out in kinds of tensors, as if all tensors were planned."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.recipes.small_models import SMALL
from weightsync.plan import Layout, Members
from weightsync.plan.direct import alike
from weightsync.plan.direct.alike import AlikeReshard
from weightsync.plan.figures.estimate import DirectFloor
from weightsync.recipes.forecast.engine_reads import reads_floor
from weightsync.recipes.forecast.grids import TrainersGrid, engine_layout
from weightsync.recipes.forecast.hosts import HostSpec, Rate
from weightsync.recipes.forecast.parallel import parse_engine, parse_trainers
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors


def hosts(gpus_per_host: int) -> tuple[str, HostSpec]:
    rates = {
        name: Rate(gb_per_s=rate, source="datasheet")
        for name, rate in {"hbm": 4800.0, "nvlink": 450.0, "host": 64.0, "nic": 50.0}.items()
    }
    return "some", HostSpec(gpu="any", gpus_per_host=gpus_per_host, **rates)


def floors(
    model: ModelShape, trainers: str, engines: tuple[str, ...], apart: bool, per_host: int | None
) -> tuple[DirectFloor, DirectFloor]:
    """The floor of all tensors, and that in kinds."""
    tensors, source_ranks = checkpoint_tensors(model), parse_trainers(trainers)
    source = TrainersGrid(tensors, model, source_ranks)
    known = {cut: engine_layout(tensors, model, parse_engine(cut)) for cut in set(engines)}
    layouts: dict[str, Layout] = {}
    gpus: dict[str, tuple[int, ...]] = {}
    end = source_ranks.num_ranks if apart else 0
    for number, cut in enumerate(engines):
        layouts[f"e{number}"] = known[cut]
        gpus[f"e{number}"] = tuple(range(end, end := end + known[cut].num_ranks))
    trainer_gpus = tuple(range(source_ranks.num_ranks))
    members = Members(max(len(trainer_gpus), end), trainer_gpus, tuple(gpus.items()))
    fleet = (source, layouts, members, {meta.name for meta in tensors}, per_host and hosts(per_host))
    with mock.patch.object(AlikeReshard, "of", return_value=None):
        whole = reads_floor(*fleet)
    with mock.patch.object(alike, "LEAST_ALIKE", 0):
        return whole, reads_floor(*fleet)


UNIQUE = ("fsdp=1", "fsdp=5", "fsdp=12", "zero=6", "pp=3")
REPLICAS = ("fsdp=6", "hsdp=3x2", "hsdp=2x6", "tp=2,dp=3,ep=6", "dp=4,ep=2,pp=2")
ENGINES = ("tp=1", "tp=4", "tp=4,ep=2", "tp=2,dp=2,ep=4")
FLEETS = st.lists(st.sampled_from(ENGINES), min_size=1, max_size=3).map(tuple)
PER_HOST = st.sampled_from([None, 2, 3, 4, 8])


@given(st.sampled_from(UNIQUE), FLEETS, st.booleans(), PER_HOST)
def test_reads_in_kinds_have_the_floor_of_all_tensors(
    trainers: str, engines: tuple[str, ...], apart: bool, per_host: int | None
) -> None:
    whole, kinds = floors(SMALL["moe"], trainers, engines, apart, per_host)
    assert kinds == whole


@given(st.sampled_from(REPLICAS), FLEETS, st.booleans(), PER_HOST)
def test_replicas_that_are_read_are_as_near(
    trainers: str, engines: tuple[str, ...], apart: bool, per_host: int | None
) -> None:
    """Which of several equally near ones is read may differ."""
    whole, kinds = floors(SMALL["glm"], trainers, engines, apart, per_host)
    assert [sum(rank.nbytes) for rank in kinds.ranks] == [sum(rank.nbytes) for rank in whole.ranks]
    assert [rank.nbytes[0] for rank in kinds.ranks] == [rank.nbytes[0] for rank in whole.ranks]
    assert kinds.num_copies == pytest.approx(whole.num_copies, rel=0.1)
    if per_host is None:
        assert kinds.nbytes == whole.nbytes
