"""Adapter of a server of SGLang that somebody else started, whose requests may name LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, NoReturn, TypeVar

from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.engines.serving.adopted_engine import AdoptedEngine
from weightsync.engines.serving.checks import check_version
from weightsync.engines.sglang.api import LOADER, Manager, has_sessions
from weightsync.engines.sglang.lora import Adapted, SlotOptions
from weightsync.engines.sglang.rank_calls import Replies
from weightsync.engines.sglang.ranks import SglangRanks
from weightsync.engines.sglang.served import serve
from weightsync.engines.sglang.worker import RankSettings
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec

T = TypeVar("T")

_RUN_S = 60.0
"""Time for a request of one token, which waits while an update pauses SGLang."""
_DEFAULTS = {
    **dict.fromkeys(("dp_size", "pp_size", "nnodes", "tokenizer_worker_num"), 1),
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "weight_cache_mode": "off",
    "speculative_algorithm": None,
}
"""Options of a server that must have these values: other values put weights or ranks out of our reach."""


class AdoptedSglang(AdoptedEngine, SglangRanks):
    """The server whose ``TokenizerManager`` is `manager`, on the event loop `loop`.

    Requests go to the server as before. They wait while it is paused, and after a failed load until a load
    succeeds. Methods block, so they must be called from another thread than the loop's.

    Raises ConfigError, named as the option of ``launch_server``, if the server cannot be updated.
    """

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:  # noqa: ANN401 - SGLang's
        super().__init__("")
        check_version("sglang")
        options = manager.server_args
        _require_updatable(options)
        self._num_ranks = options.tp_size
        self._manager, self._loop = Manager(manager, self._num_ranks), loop
        self._settings = RankSettings(
            "sglang",
            options.model_path,
            str(manager.model_config.dtype).removeprefix("torch."),
            overrides=options.json_model_override_args or "{}",
            trust_remote_code=options.trust_remote_code,
            revision=options.revision,
        )
        self._replies = Replies("sglang", self._num_ranks)
        self._slots = SlotOptions.of(partial(getattr, options))
        self._pausing = asyncio.Lock()  # updates of the model and of adapters come at the same time
        serve(self._adapters)

    def layout(self) -> Sequence[LayoutTable]:
        """Return the layout of each rank."""
        self._join()
        return super().layout()

    async def _pause(self, mode: str) -> None:
        """Pause. ``abort`` ends running requests early, with the tokens that they have."""
        manager = self._manager.manager
        async with self._pausing:
            if mode == "keep" or manager.is_pause:
                await self._manager.pause("retract")
                return
            if mode == "abort":
                manager.abort_request(abort_all=True)
            async with manager.model_update_lock.writer_lock:  # once no request runs; others wait
                await self._manager.pause("retract")

    async def _go_on(self) -> None:
        async with self._pausing:
            await self._manager.go_on()

    def resume(self, version: int) -> None:
        """Serve `version`.

        Raises StateError while the weights are dummies or a mix, and if somebody has resumed SGLang while
        they were written.
        """
        self.require_whole()
        self._wait(self._commit(version))
        self._is_halted, self._serving = False, version

    async def _commit(self, version: int) -> None:
        async with self._pausing:
            if not self._manager.manager.is_pause:
                self._is_halted = False
                why = "somebody resumed SGLang while weights were written: tokens since then may be of a mix"
                raise StateError(f"engine {self._name}: {why}")
            await self._manager.label(str(version))
            if not await self._manager.forget():
                raise EngineError(self._name, "commit", "the engine keeps what earlier weights cached")
            await self._manager.go_on()

    def _sleep_option(self, level: int) -> NoReturn:
        raise ConfigError("sleep", "a server of SGLang", "leave it out: requests would end it")

    def _asked(
        self, method: str, work: Callable[[Manager], Coroutine[Any, Any, T]], wait_s: float | None = None
    ) -> T:
        with self._naming(method, FutureTimeoutError):
            return self._wait(self._alone(work), wait_s)

    async def _alone(self, work: Callable[[Manager], Coroutine[Any, Any, T]]) -> T:
        async with self._pausing:
            if self._manager.manager.is_pause:
                return await work(self._manager)
            # Without a pause, SGLang would wait for running requests and admit no others.
            await self._manager.pause("in_place")
            try:
                return await work(self._manager)
            finally:
                await self._manager.go_on()

    def open_adapter(self, spec: AdapterSpec) -> AdapterEngine:
        """Take two slots. Raises ConfigError also if the server has another adapter of that name."""
        manager = self._manager.manager
        if self._slots.enabled and spec.name in manager.lora_registry.get_all_adapters():
            raise ConfigError("name", spec.name, "choose another: the server has loaded an adapter so called")
        if manager.is_pause and not self._whole:
            raise StateError(f"engine {self._name} has no version yet: update_weights() comes first")
        return super().open_adapter(spec)

    def _run(self, prompt: Sequence[int], settings: Adapted) -> None:
        try:
            with self._naming("adapter", FutureTimeoutError):
                self._wait(self._manager.run(settings.lora, prompt, settings, lambda _: None, ""), _RUN_S)
        except FutureTimeoutError as error:
            late = f"engine {self._name}, which an update may pause"
            raise DeadlineError("register_adapter", (late,), _RUN_S) from error

    def _drop(self, name: str) -> None:
        """Have SGLang unload an adapter, without a pause, in which aborted requests would not end."""
        with self._naming("adapter"):
            self._wait(self._manager.unload_lora(name))


def _require_updatable(options: Any) -> None:  # noqa: ANN401 - SGLang's
    """Raise ConfigError for options of ``launch_server`` with which no update works."""
    if not has_sessions():
        raise ConfigError("sglang", "earlier than 0.5.21", "install a newer one: it lets no plug-in in")
    for name, default in _DEFAULTS.items():
        if (value := getattr(options, name, default)) != default:
            raise ConfigError(name, value, f"start the server without it: the default is {default}")
    if LOADER not in (options.custom_weight_loader or ()):
        raise ConfigError(
            "custom_weight_loader", None, f"start the server with --custom-weight-loader {LOADER}"
        )
