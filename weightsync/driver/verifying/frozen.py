"""Frozen tensors: whether engines have them, and whether trainers changed them."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.driver.verifying.comparison import Comparison
from weightsync.errors import StateError
from weightsync.plan import Plan
from weightsync.protocol.messages import Fingerprint


class FrozenTensors:
    """The frozen tensors of a connection.

    Attributes:
        nbytes: the bytes of the frozen tensors.
        committed: the fingerprint of the frozen tensors in the last version; None before the first version.
    """

    def __init__(self, comparison: Comparison, plan: Plan) -> None:
        self._comparison = comparison
        self.nbytes = sum(plan.tensors[i].nbytes for i in plan.frozen)
        self.committed: Fingerprint | None = None

    def are_held(self, connection: Connection, takers: Mapping[str, EngineMember], version: int) -> bool:
        """Return True if all `takers` have the frozen tensors in memory that updates do not clear."""
        now = EngineRecord(EngineState.SERVING, version)
        # An engine that came after connect has one of these layouts.
        keeps = all(rank.buffers for ranks in connection.layouts.values() for rank in ranks)
        return self.committed is not None and keeps and all(each.record == now for each in takers.values())

    async def check(self, connection: Connection, version: int, published: Fingerprint) -> None:
        """Raise StateError if a frozen tensor changed since `version`, the last committed version."""
        if self.committed is None or (published == self.committed).all():
            return
        name = await self._comparison.changed_frozen(connection.plan, version)
        raise StateError(
            f"{name} is frozen, and changed since version {version}: take it out of frozen=, "
            "or call connect() to send the frozen tensors again"
        )
