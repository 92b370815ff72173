"""Adapter of a vLLM engine that the user drives. It only pauses, loads and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from weightsync.config import PrefixCache
from weightsync.engines.rank.rank_host import RankHost
from weightsync.engines.serving.adopted_engine import AdoptedEngine
from weightsync.engines.serving.checks import check_version, refuse_salt
from weightsync.engines.serving.engine_ranks import CACHES, WEIGHTS
from weightsync.engines.vllm.adapter import VllmRanks
from weightsync.engines.vllm.api import pause_waits, require_one_core, sleeps_half_awake
from weightsync.errors import ConfigError, PeerLostError, StateError
from weightsync.faults import Fault
from weightsync.protocol.messages import Loaded

T = TypeVar("T")

_WORKER = "weightsync.WeightSyncWorker"
_TURNS = 4
"""Turns of the loop in which vLLM sends a call: it makes a task for each core."""


class AsyncVllm(Protocol):
    """The methods of vLLM's ``AsyncLLM`` that are used here, equal in 0.24 to 0.33."""

    @property
    def errored(self) -> bool: ...
    @property
    def vllm_config(self) -> Any: ...  # noqa: ANN401 - vLLM's
    def sleep(self, level: int, mode: str) -> Coroutine[object, object, None]: ...
    def wake_up(self, tags: list[str]) -> Coroutine[object, object, object]: ...
    def pause_generation(self, *, mode: str, clear_cache: bool) -> Coroutine[object, object, None]: ...
    def resume_generation(self) -> Coroutine[object, object, None]: ...
    def is_paused(self) -> Coroutine[object, object, bool]: ...
    def collective_rpc(
        self, method: str, *, args: tuple[bytes, ...]
    ) -> Coroutine[object, object, list[bytes]]: ...


class AdoptedVllm(AdoptedEngine, VllmRanks):
    """An ``AsyncLLM`` with `WeightSyncWorker` mixed into the workers, on the caller's event loop.

    The caller asks it for tokens as before. Requests wait while vLLM is paused, and after a failed load until
    a load succeeds. If vLLM was paused by ``abort`` or ``wait``, newer versions of vLLM refuse requests
    instead, see docs/guide.md. Methods block, so they must be called from another thread than the loop's.

    Raises ConfigError if vLLM has several replicas.
    """

    def __init__(self, llm: AsyncVllm, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("")
        check_version("vllm")
        require_one_core(llm)
        self._llm, self._loop = llm, loop

    def check(self) -> None:
        """Raise PeerLostError if vLLM is dead. vLLM does not say which rank it lost."""
        if self._llm.errored:
            raise PeerLostError(f"engine {self._name}", "vLLM's engine core is dead")

    def hosts(self) -> Sequence[RankHost]:
        """Return the host of each rank, see `HasRankHosts.hosts`."""
        return self.on_ranks("host")

    def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set each process's part of `faults`, also before the ranks are connected."""
        self._num_ranks = len(self.on_ranks("settle"))
        super().set_faults(process, faults, seed)

    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        """Raise ConfigError for ``salt``: the requests are not ours."""
        refuse_salt(treatment, self._name, "its requests are made by methods of your own")

    async def _pause(self, mode: str) -> None:
        """Pause as ``pause_generation``, which then sleeps for 20 ms, so that last outputs are seen first."""
        llm: Any = self._llm
        renderer = getattr(llm, "renderer", None)
        if self._pause_core and renderer and hasattr(renderer, "clear_mm_cache_async"):
            await renderer.clear_mm_cache_async()
            await self._pause_core(mode=mode, clear_cache=True)
        else:
            await llm.pause_generation(mode=mode, clear_cache=True)

    @property
    def _pause_core(self) -> Callable[..., Coroutine[object, object, object]] | None:
        """The call by which ``pause_generation`` pauses vLLM's core, if it is known."""
        core = getattr(self._llm, "engine_core", None)
        names = ("pause_generation_async", "pause_scheduler_async")  # from 0.33 on, and before
        return next((getattr(core, name) for name in names if hasattr(core, name)), None)

    def _settle(self) -> None:
        if not pause_waits():
            super()._settle()

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Take one attempt's buckets. Raises StateError if somebody has resumed a vLLM that can sleep."""
        loaded = super().load(attempt, timeout_s)
        if self._sleeps and not self._wait(self._llm.is_paused()):  # later, caches that wake resume it
            raise self._was_resumed()
        return loaded

    def resume(self, version: int) -> None:
        """Serve `version`.

        Raises StateError while the weights are dummies or a mix, and if somebody has resumed vLLM while they
        were written.
        """
        self.require_whole()
        self._wake(WEIGHTS, CACHES)
        self._is_halted = False
        if not self._sleeps and not self._wait(self._resume()):
            raise self._was_resumed()
        if self._sleeps and CACHES not in self.on_ranks("asleep")[0]:  # else others wake them, and resume it
            self._wait(self._llm.resume_generation())
        self._serving = version

    def _was_resumed(self) -> StateError:
        why = "somebody resumed vLLM while weights were written: tokens since then may be of a mix"
        return StateError(f"engine {self._name}: {why}")

    async def _go_on(self) -> None:
        await self._llm.resume_generation()

    async def _resume(self) -> bool:
        """Resume vLLM, and return True if it was paused until then.

        vLLM's core handles calls in the order in which they are sent: the second need not wait for an answer.
        """
        asked = asyncio.ensure_future(self._llm.is_paused())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        was_paused, _ = await asyncio.gather(asked, self._llm.resume_generation())
        return was_paused

    @property
    def _sleeps(self) -> bool:
        return bool(self._llm.vllm_config.model_config.enable_sleep_mode)

    def _sleep_option(self, level: int) -> tuple[str, bool]:
        return "enable_sleep_mode", self._sleeps

    def _release(self, level: int) -> None:
        self._wait(self._llm.sleep(level, "keep"))

    def _allocate(self, part: str) -> None:
        self._wait(self._llm.wake_up([part]))  # vLLM's core resumes once all is awake

    def _wake_to_sleep(self) -> None:
        """Stay half awake, since vLLM's core would resume, maybe with a mix."""
        if CACHES in self._asleep and not sleeps_half_awake():
            why = "is half awake: vLLM before 0.31 would make tokens before it sleeps"
            raise StateError(f"engine {self._name} {why}: update or heal it first")

    def _ask(self, blob: bytes) -> Sequence[bytes]:
        try:
            return self._wait(self._llm.collective_rpc("ws_call", args=(blob,)))
        except Exception as error:
            if "ws_call" in str(error):
                remedy = f"make the AsyncLLM with {_WORKER!r}, or a class derived from it"
                raise ConfigError("worker_extension_cls", None, remedy) from error
            self.check()
            raise
