"""Checks of ranks that only know a part of the model, such as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weightsync.errors import ConfigError, PlanError, nearest
from weightsync.plan.layout.segment import RankLayout, Stage


def check_stages(ranks: Mapping[int, RankLayout]) -> None:
    """Check the stages of all ranks of one side. Ranks without a stage are skipped.

    `ranks` may leave out ranks that say the same as an earlier one.

    Raises:
        ConfigError: a setting fits no name of any rank.
        PlanError: two stages hold a tensor that they do not share.
    """
    stages = [(rank, layout, layout.stage) for rank, layout in ranks.items() if layout.stage]
    if stages and len(stages) == len(ranks):
        _check_settings([stage for _, _, stage in stages])
    owners: dict[str, tuple[int, int]] = {}
    for rank, layout, stage in stages:
        for name in _own(layout, stage):
            owner, number = owners.setdefault(name, (rank, stage.number))
            if number != stage.number:
                raise PlanError(
                    name,
                    f"rank {owner} of pipeline stage {number} and rank {rank} of stage {stage.number} both "
                    "hold it; give each stage layers of its own: look at the layers' layer_number, and at "
                    "what each rank was given as its pipeline rank and vp_stage",
                )


def _own(layout: RankLayout, stage: Stage) -> Iterator[str]:
    return (meta.name for meta in layout.tensors if meta.name not in stage.shared)


def _check_settings(stages: Iterable[Stage]) -> None:
    """Raise for the first setting that all stages say fits none of their names."""
    first, *others = ({(each.setting, each.value): each.near for each in stage.unmatched} for stage in stages)
    for (setting, value), near in first.items():
        if all((setting, value) in other for other in others):
            known = {*near}.union(*(other[setting, value] for other in others))
            raise ConfigError(setting, value, f"it matches no name of any rank; {nearest(value, known)}")
