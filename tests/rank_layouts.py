"""What an engine's ranks declare, as objects."""

from __future__ import annotations

from weightsync.engines import Engine
from weightsync.plan import RankLayout
from weightsync.plan.layout.layout_table import LayoutTable


def rank_layouts(engine: Engine) -> list[RankLayout]:
    return [LayoutTable.of(each).rank_layout() for each in engine.layout()]
