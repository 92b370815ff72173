"""The part of the public API that moves experts between the slots of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.actors.membership import Membership
from weightsync.actors.ray.loop import LoopThread
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, nearest
from weightsync.report import SyncReport


class ExpertMethods:
    """Base of `WeightSync`, which sets the attributes."""

    _controller: Controller
    _loop: LoopThread
    _members: Membership

    def experts(self, engine: str) -> list[list[int]]:
        """Return the expert in each slot of all ranks of an engine, by layer. See docs/experts.md.

        Empty if the engine does not move experts.

        Raises:
            StateError: before `connect`.
            ConfigError: no engine has such a name.
            DeadlineError: the engine did not answer in time.
            PeerLostError: the engine's process is gone.
        """
        self._require_engines([engine])
        rows = self._loop.submit(lambda: self._controller.experts(engine)).result()
        return [[*row] for row in rows]

    def move_experts(self, experts: Mapping[str, Sequence[Sequence[int]]]) -> SyncReport:
        """Move experts of serving engines to other slots, in one commit. See docs/experts.md.

        Engines pause as ``config.pause`` says, copy experts from slot to slot, and serve the same version
        again once all their bytes were compared with the committed version. An engine that fails is healed in
        the background.

        Args:
            experts: by engine, the expert in each slot of all ranks, by layer, as `experts` returns them. An
                expert may have several slots, and needs one.

        Returns:
            A report with durations.

        Raises:
            StateError: before `connect`, while an update runs, or an engine does not serve the committed
                version.
            ConfigError: no engine has such a name, an engine does not move experts, or its slots cannot hold
                these.
            WeightSyncError: an engine failed; the error is the cause.
        """
        self._require_engines([*experts])
        return self._loop.submit(lambda: self._move_experts(experts)).result()

    async def _move_experts(self, experts: Mapping[str, Sequence[Sequence[int]]]) -> SyncReport:
        async with self._controller.exclusive():
            return await self._controller.move_experts(experts)

    def _require_engines(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._members.engines:
                raise ConfigError("engine", name, nearest(name, self._members.engines))
        self._controller.connection()
