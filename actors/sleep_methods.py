"""The part of the public API that frees engines' GPU memory between updates."""

from __future__ import annotations

from collections.abc import Collection

from weightsync.actors.ray.loop import LoopThread
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, StateError, nearest


class SleepMethods:
    """Base of `WeightSync`, which sets the attributes."""

    _controller: Controller
    _fleet: Fleet
    _loop: LoopThread

    def sleep(self, engines: Collection[str] = (), *, level: int = 2) -> None:
        """Make engines release their GPU memory, so that a trainer can use it. See docs/guide.md.

        Engines pause as ``config.pause`` says and refuse requests. The next `update_weights` wakes them: it
        allocates and writes their weights, verifies them, and only then allocates caches. Engines that sleep
        already stay as they are.

        Args:
            engines: names; empty means all.
            level: 1 keeps weights in host memory, so that `wake` can serve them again; 2 drops them.

        Raises:
            StateError: before `connect`, or while an update runs.
            ConfigError: `level` is not 1 or 2, no engine has such a name, or one was not started with sleep
                mode.
            DeadlineError: an engine did not pause in time; it keeps serving.
            EngineError: an engine failed while it released memory; it is STALE.
            PeerLostError: an engine's process is gone.
        """
        if level not in (1, 2):
            remedy = "give 1, which keeps weights on the host, or 2, which drops them"
            raise ConfigError("level", level, remedy)
        self._loop.submit(lambda: self._sleep(engines, level)).result()

    def wake(self, engines: Collection[str] = ()) -> None:
        """Make engines that sleep at level 1 serve their version again.

        Their weights are not compared: `coverage` says so. `heal` writes them again, and compares them.

        Args:
            engines: names; empty means all.

        Raises:
            StateError: before `connect`, or an engine sleeps at level 2: use `update_weights`, or `heal`.
            ConfigError: no engine has such a name.
            DeadlineError: an engine did not wake in time.
            EngineError: an engine got no memory; it is STALE.
            PeerLostError: an engine's process is gone.
        """
        self._loop.submit(lambda: self._wake(engines)).result()

    async def _sleep(self, engines: Collection[str], level: int) -> None:
        gone = (EngineState.DEAD, EngineState.ASLEEP)
        awake = [name for name, state in _states(self._fleet, engines).items() if state not in gone]
        async with self._controller.exclusive():
            await self._controller.sleep(awake, level)

    async def _wake(self, engines: Collection[str]) -> None:
        states = _states(self._fleet, engines).items()
        asleep = [name for name, state in states if state is EngineState.ASLEEP]
        async with self._controller.exclusive():
            await self._controller.wake(asleep)


def _states(fleet: Fleet, engines: Collection[str]) -> dict[str, EngineState]:
    """Return the states of `engines`, of all if it is empty. Raises StateError or ConfigError."""
    states = {name: member.record.state for name, member in fleet.engines.items()}
    if not states:
        raise StateError("call connect() before sleep() and wake()")
    for name in engines:
        if name not in states:
            raise ConfigError("engine", name, nearest(name, states))
    return {name: state for name, state in states.items() if name in (engines or states)}
