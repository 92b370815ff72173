"""The part of the public door that lets engines and trainers take turns on a GPU."""

from __future__ import annotations

from collections.abc import Collection

from actors.loop import LoopThread
from weightsync.driver.controller import Controller
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.errors import ConfigError, StateError, nearest

__all__ = ["SleepingEngines"]


class SleepingEngines:
    """Engines that give their memory back between two updates."""

    _controller: Controller
    _fleet: Fleet
    _loop: LoopThread

    def sleep(self, engines: Collection[str] = (), *, level: int = 2) -> None:
        """Have engines give their GPU memory back, for a trainer to use; all of them if none is named.

        They pause as ``config.pause`` says, and refuse requests until the next `update_weights`, which takes
        the memory of their weights back, writes and verifies these, then takes back that of caches, and
        serves. With `level` 1 weights are kept on the host, so that `wake` serves them again; 2 drops them.
        See docs/guide.md.

        One that sleeps already is left as it is.

        Raises:
            StateError: before `connect`, or while an update runs.
            ConfigError: `level` is not 1 or 2, no engine has such a name, or one was not started to sleep.
            DeadlineError: an engine did not pause in time; it serves on.
            EngineError: an engine failed with its memory half given back, and is STALE.
            PeerLostError: an engine's process is gone.
        """
        if level not in (1, 2):
            remedy = "give 1, which keeps weights on the host, or 2, which drops them"
            raise ConfigError("level", level, remedy)
        self._loop.submit(lambda: self._sleep(engines, level)).result()

    def wake(self, engines: Collection[str] = ()) -> None:
        """Have engines that sleep serve the same version again; all of them if none is named.

        Raises:
            StateError: before `connect`, or for one that sleeps with level 2: `update_weights` wakes it, or
                `heal`, with the version that the holders keep.
            ConfigError: no engine has such a name.
            DeadlineError: an engine did not wake in time.
            EngineError: an engine found no memory, and is STALE.
            PeerLostError: an engine's process is gone.
        """
        self._loop.submit(lambda: self._wake(engines)).result()

    async def _sleep(self, engines: Collection[str], level: int) -> None:
        gone = (EngineState.DEAD, EngineState.ASLEEP)
        awake = [name for name, state in self._states(engines).items() if state not in gone]
        async with self._controller.alone():
            await self._controller.sleep(awake, level)

    async def _wake(self, engines: Collection[str]) -> None:
        asleep = [name for name, state in self._states(engines).items() if state is EngineState.ASLEEP]
        async with self._controller.alone():
            await self._controller.wake(asleep)

    def _states(self, engines: Collection[str]) -> dict[str, EngineState]:
        states = {name: seat.record.state for name, seat in self._fleet.engines.items()}
        if not states:
            raise StateError("connect() has to come before sleep() and wake()")
        for name in engines:
            if name not in states:
                raise ConfigError("engine", name, nearest(name, states))
        return {name: state for name, state in states.items() if name in (engines or states)}
