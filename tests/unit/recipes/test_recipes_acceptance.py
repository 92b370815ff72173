"""The share of drafted tokens that engines accepted; plain coroutines stand for Ray's calls."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightsync.engines import DraftCounts
from weightsync.errors import PeerLostError
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.inputs import SHIPPED
from weightsync.recipes.loops.acceptance import acceptance, count_drafts


class Engine:
    """`draft_counts.remote` as of an actor's handle."""

    def __init__(self, answer: DraftCounts | Exception | None) -> None:
        self._answer = answer
        self.draft_counts = self

    async def remote(self) -> DraftCounts | None:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def counted(recipe: str, **engines: Any) -> dict[str, DraftCounts]:
    return count_drafts(load_recipe(SHIPPED / f"{recipe}.yaml"), engines)


def test_engines_are_asked_if_the_recipe_has_a_draft() -> None:
    dead = Engine(PeerLostError("engine b", "killed"))
    assert counted("speculative", a=Engine(DraftCounts(8, 3)), b=dead, c=Engine(None)) == {
        "a": DraftCounts(8, 3)
    }
    assert counted("quickstart", a=object()) == {}


def test_engines_that_failed_or_count_anew_are_left_out() -> None:
    before = {"a": DraftCounts(10, 5), "b": DraftCounts(10, 5), "c": DraftCounts(10, 5)}
    after = {"a": DraftCounts(30, 20), "b": DraftCounts(90, 5), "c": DraftCounts(4, 4)}
    assert acceptance(before, after, ["b"]) == 0.75
    assert acceptance(before, {**after, "d": DraftCounts(20, 3)}, ["b"]) == 0.45, "d joined in between"
    assert acceptance(before, before, []) is None
    assert acceptance({}, {}, []) is None


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), max_size=4))
def test_the_share_is_that_of_all_engines_together(engines: list[tuple[int, int, int]]) -> None:
    before = {str(i): DraftCounts(start, start // 2) for i, (start, _, _) in enumerate(engines)}
    after = {
        str(i): DraftCounts(start + accepted + refused, start // 2 + accepted)
        for i, (start, accepted, refused) in enumerate(engines)
    }
    accepted, refused = (sum(each[i] for each in engines) for i in (1, 2))
    share = accepted / (accepted + refused) if accepted + refused else None
    assert acceptance(before, after, []) == share
