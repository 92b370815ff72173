"""Drafts that are not frozen on purpose, or not the same in all engines, are refused."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

from weightsync import ConfigError, SyncConfig
from weightsync.driver.drafts import Drafts
from weightsync.plan import RankLayout
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.layout_table import LayoutTable

FROZEN = SyncConfig(components={"draft": "frozen"})
DRAFT = Draft("eagle3", "a/draft", 3, 100, 0, "kind", "digest")
OTHER = replace(DRAFT, digest="other")
TRAINED = SyncConfig(components={"draft": "trained"})


def ranks(*drafts: Draft | None) -> Sequence[LayoutTable]:
    return [LayoutTable.of(RankLayout((), (), draft=draft)) for draft in drafts]


def test_a_draft_that_nobody_covers_is_refused_with_the_remedies() -> None:
    with pytest.raises(ConfigError) as caught:
        Drafts().check({"e0": ranks(None), "e1": ranks(None, DRAFT)}, SyncConfig())
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.field == "speculative_config of engine e1"
    assert error.value == {"method": "eagle3", "model": "a/draft"}
    assert 'SyncConfig(components={"draft": "frozen"})' in error.remedy
    assert '{"draft": "trained"}' in error.remedy
    assert "leave speculative decoding out" in error.remedy


def test_engines_without_drafts_need_no_setting() -> None:
    drafts = Drafts()
    drafts.check({"e0": ranks(None, None)}, SyncConfig())
    assert not any(drafts.by_engine.values())


def test_equal_drafts_are_taken_in_by_engine() -> None:
    drafts = Drafts()
    drafts.check({"e0": ranks(DRAFT, None), "e1": ranks(DRAFT)}, FROZEN)
    assert drafts.by_engine == {"e0": [DRAFT], "e1": [DRAFT]}


@pytest.mark.parametrize("name", ["e0", "e1"])
def test_the_same_draft_with_other_bytes_is_refused_in_any_engine(name: str) -> None:
    drafts = Drafts()
    drafts.check({"e0": ranks(DRAFT)}, FROZEN)
    said = "it had others before" if name == "e0" else "engine e0 has others"
    with pytest.raises(ConfigError, match=rf"engine {name}: .*bytes in rank 0 .*{said}.*a path of its own"):
        drafts.check({name: ranks(OTHER)}, FROZEN)


@pytest.mark.parametrize(
    "other",
    [
        ranks(replace(OTHER, model="another/draft")),
        ranks(replace(OTHER, kind="another GPU")),
        ranks(None, OTHER),
    ],
)
def test_other_drafts_devices_and_ranks_may_have_other_bytes(other: Sequence[LayoutTable]) -> None:
    drafts = Drafts()
    drafts.check({"e0": ranks(DRAFT), "e1": other}, FROZEN)


def test_trained_drafts_need_not_have_equal_bytes_before_an_update() -> None:
    drafts = Drafts()
    trained = Draft("eagle3", "a/draft", trained=True)
    drafts.check({"e0": ranks(trained, None), "e1": ranks(trained)}, TRAINED)
    assert drafts.by_engine == {"e0": [trained], "e1": [trained]}


def test_a_draft_that_the_engine_cannot_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine e1: .*freeze it: updates do not reach drafts"):
        Drafts().check({"e0": ranks(replace(DRAFT, trained=True)), "e1": ranks(DRAFT)}, TRAINED)
