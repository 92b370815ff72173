"""What adapters keep of their ranks' layouts."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch

from weightsync.engines.rank.host import Host
from weightsync.engines.rank.rank import Rank
from weightsync.engines.serving.engine_ranks import EngineRanks
from weightsync.errors import ConfigError
from weightsync.plan import Plan, RankLayout
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.layout_table import LayoutTable


class Sleeping(EngineRanks):
    """An engine of two ranks. The second may have a draft."""

    def __init__(self, draft: Draft | None) -> None:
        super().__init__("e0")
        self.layouts = [LayoutTable.of(RankLayout((), (), draft=each)) for each in (None, draft)]
        self.released: list[int] = []
        self.asked: list[tuple[object, ...]] = []

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        self.asked.append((method, *args))
        return self.layouts if method == "layout" else [None, None]

    def pause(self, mode: str, timeout_s: float) -> None: ...

    def _sleep_option(self, level: int) -> tuple[str, bool]:
        return "options.enable_sleep_mode", True

    def _release(self, level: int) -> None:
        self.released.append(level)

    def _allocate(self, part: str) -> None: ...


def test_ranks_log_from_the_level_of_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, logger = Sleeping(None), logging.getLogger("weightsync")
    for level, told in ((logging.DEBUG, ["use_log_level", "attach"]), (logging.NOTSET, ["attach"])):
        monkeypatch.setattr(logger, "level", level)
        engine.asked.clear()
        engine.attach(cast("Plan", None), (), 1)
        assert [method for method, *_ in engine.asked] == told
    rank = Rank("torch", 0, torch.device("cpu"), cast("Host", None))
    monkeypatch.setattr(logger, "handlers", [])
    assert rank.answer("use_log_level", ["ERROR"]) is None
    assert logger.level == logging.ERROR
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("draft", [None, Draft("eagle", "a/draft", 1, 4, 0, "kind", "digest")])
def test_an_engine_with_a_draft_sleeps_with_it(draft: Draft | None) -> None:
    engine = Sleeping(draft)
    engine.layout()
    if draft:
        with pytest.raises(ConfigError, match=r"level: 2 .* give 1: level 2 drops the draft"):
            engine.sleep(2, "keep", 1)
        engine.sleep(1, "keep", 1)
    else:
        engine.sleep(2, "keep", 1)
    assert engine.released == [1 if draft else 2]
