"""Ranks that each know a part of a model: what they may hold together, and settings that fit none of them."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError, PlanError
from weightsync.plan import Layout, RankLayout, Segment, Stage, TensorMeta, Unmatched

EMBEDDING, FIRST, SECOND = (TensorMeta(name, "float32", (2, 3)) for name in ("embed", "layers.0", "layers.1"))


def rank(*metas: TensorMeta, stage: Stage | None) -> RankLayout:
    return RankLayout(metas, tuple(map(Segment.whole, metas)), stage=stage)


def test_stages_share_what_both_say_is_shared_and_replicas_share_all() -> None:
    first, last = Stage(0, shared=("embed",)), Stage(1, shared=("embed",))
    ranks = [
        *(rank(EMBEDDING, FIRST, stage=first) for _ in range(2)),
        *(rank(EMBEDDING, SECOND, stage=last) for _ in range(2)),
    ]
    assert Layout.from_ranks(ranks).names == ("embed", "layers.0", "layers.1")


@pytest.mark.parametrize("shared", [(), ("embed",)])
def test_stages_that_hold_one_tensor_are_refused(shared: tuple[str, ...]) -> None:
    first, last = Stage(0, shared=shared), Stage(3)
    ranks = [
        rank(FIRST, stage=first),
        rank(EMBEDDING, stage=None),
        rank(EMBEDDING, SECOND, stage=first),
        rank(SECOND, stage=last),
    ]
    says = (
        r"^layers\.1: rank 2 of pipeline stage 0 and rank 3 of stage 3 both hold it; give each stage layers"
    )
    with pytest.raises(PlanError, match=says):
        Layout.from_ranks(ranks)


def test_a_rank_without_a_stage_may_hold_everything() -> None:
    everything = rank(EMBEDDING, FIRST, SECOND, stage=None)
    assert Layout.from_ranks([rank(FIRST, stage=Stage(0)), everything, rank(SECOND, stage=Stage(1))])


def unmatched(*values: str, near: tuple[str, ...]) -> Stage:
    return Stage(unmatched=tuple(Unmatched("exclude", value, near) for value in values))


def test_a_setting_that_fits_no_rank_is_refused_with_the_nearest_name_of_any() -> None:
    stages = [
        unmatched("haed.wei*", near=("embed",)),
        unmatched("a", "haed.wei*", near=("head.weight", "norm")),
    ]
    ranks = [rank(EMBEDDING, stage=stage) for stage in stages]
    with pytest.raises(
        ConfigError, match=r"^exclude: 'haed\.wei\*' is not valid; it matches no name of any ra"
    ) as e:
        Layout.from_ranks(ranks)
    assert "did you mean 'head.weight'? valid: embed, head.weight, norm" in str(e.value)


def test_a_setting_that_fits_one_rank_or_that_a_rank_does_not_tell_of_is_accepted() -> None:
    wrong = rank(EMBEDDING, stage=unmatched("heda.*", near=("embed",)))
    for other in (rank(EMBEDDING, stage=Stage()), rank(EMBEDDING, stage=None)):
        assert Layout.from_ranks([wrong, other])
