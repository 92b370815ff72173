"""Counts the tokens that drafts proposed in a step's rollouts, and the accepted tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray.actor import ActorHandle

from weightsync.engines import DraftCounts
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.calls import gather


def count_drafts(recipe: Recipe, engines: Mapping[str, ActorHandle[Any]]) -> dict[str, DraftCounts]:
    """Ask `engines` for the drafted tokens since their start, if the recipe has a draft.

    Engines that fail or do not count are left out.
    """
    if not recipe.draft:
        return {}
    calls = {name: engine.draft_counts.remote() for name, engine in engines.items()}
    answers = gather(calls, "count drafts", recipe.sync.timeout_s).answers
    return {name: counts for name, counts in answers.items() if counts}


def acceptance(
    before: Mapping[str, DraftCounts], after: Mapping[str, DraftCounts], lost: Collection[str]
) -> float | None:
    """Return the share of the tokens drafted between two counts that was accepted. None if none was drafted.

    Engines of `lost`, which failed in between, are left out: they may count from zero again.
    """
    made = [
        counts.since(before.get(name, DraftCounts())) for name, counts in after.items() if name not in lost
    ]
    made = [counts for counts in made if counts.num_drafted > 0]
    total = DraftCounts(
        sum(counts.num_drafted for counts in made), sum(counts.num_accepted for counts in made)
    )
    return total.acceptance
