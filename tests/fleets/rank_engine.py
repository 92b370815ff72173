"""An engine of one rank in this process, whose weights a `Rank` loads."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.engines.rank.rank import Rank
from weightsync.plan import Plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.messages import Attached, FeedTicket, Loaded
from weightsync.testing import DictEngine


class RankEngine(DictEngine):
    """Serves what its rank holds."""

    rank: Rank

    def layout(self) -> Sequence[LayoutTable]:  # type: ignore[override]
        return [self.rank.layout()]

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        return [self.rank.attach(plan, tickets, timeout_s, False)]

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        return [self.rank.load(attempt, timeout_s)]

    def close(self) -> None:
        self.rank.close()
