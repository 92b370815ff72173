"""Adapter of SGLang by its public hooks: weight loader, pauses, calls for weights and memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from weightsync.engines.lora.adapter_engine import ServedAdapter
from weightsync.engines.lora.slot_serving import SlotServing
from weightsync.engines.rank.rank_process import RankProcess, RankWatch
from weightsync.engines.serving.checks import check_version, require_gpus
from weightsync.engines.serving.engine_ranks import CACHES, WEIGHTS
from weightsync.engines.serving.request_loop import Params, RequestLoop
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.sglang.api import SglangServer, has_sessions, sampling_params, server_args
from weightsync.engines.sglang.draft import Speculation
from weightsync.engines.sglang.lora import Adapted, SlotOptions, slot_name
from weightsync.engines.sglang.rank_calls import Replies
from weightsync.engines.sglang.ranks import SglangRanks
from weightsync.engines.sglang.worker import RankSettings
from weightsync.errors import ConfigError, DeadlineError, StateError, WeightSyncError

logger = logging.getLogger("weightsync.engines.sglang")

_END_S = 20.0
_SIG_IGN = ctypes.c_void_p(1)
_SLEEP_OPTIONS = ("enable_memory_saver", "enable_weights_cpu_backup")


class SglangEngine(SlotServing, SglangRanks):
    """One SGLang engine. SGLang starts a process per rank, on the GPUs that this process sees.

    `options` are arguments of SGLang's ``ServerArgs``, except arguments that `sglang.api` fixes;
    ``tensor_parallel_size`` is SGLang's ``tp_size``. ``dtype`` defaults to the dtype in the model's config.

    Raises:
        ConfigError: an option that SGLang does not have or cannot be updated with, or more ranks than GPUs;
            named as ``options.<field>``.
    """

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        """Start SGLang with the model's config and dummy weights."""
        check_version("sglang", options.get("device", "cuda"))
        arguments = server_args(model_path, options, has_sessions())
        self._num_ranks = arguments["tp_size"]
        if arguments.get("device") != "cpu":
            require_gpus(self._num_ranks)
        super().__init__(name)
        self._slots = SlotOptions.of(arguments.get)
        self._sleeps = [bool(arguments.get(option)) for option in _SLEEP_OPTIONS]
        self._seeds = bool(arguments.get("enable_deterministic_inference"))
        speculation = Speculation.of(arguments)
        overrides = arguments.get("json_model_override_args") or "{}"
        dtype, trusted = arguments["dtype"], bool(arguments.get("trust_remote_code"))
        self._settings = RankSettings(
            name, model_path, dtype, speculation, overrides, trusted, arguments.get("revision")
        )
        self._watch: RankWatch | None = None
        _ignore_sigquit()
        self.loop = RequestLoop(name, lambda: SglangServer(arguments), _stop)
        self._replies = Replies(name, self._num_ranks)
        try:
            ranks = self._join()
        except WeightSyncError:
            self.close()
            raise
        self._watch = RankWatch(name, [rank for rank in ranks if rank], self.loop.thread.fail)

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens. ``abort`` ends running requests early, with the tokens that they have."""
        deadline = time.monotonic() + timeout_s
        frozen = self.loop.frozen
        self.loop.freeze(mode, timeout_s)
        self._wake(WEIGHTS)
        try:
            self.on_ranks("settle", wait_s=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            if not frozen:
                self.loop.undo_freeze()
            raise DeadlineError(f"pause ({mode})", (f"engine {self._name}",), timeout_s) from error

    def resume(self, version: int) -> None:
        """Serve `version`. Raises StateError while the weights are dummies or a mix."""
        self.require_whole()
        self._wake(WEIGHTS, CACHES)
        self._asked("commit", lambda server: server.label(str(version)))
        self._serve(version)

    def init_weights_update_group(self, **fields: object) -> None:
        """Make SGLang's own call, for loops that send weights themselves. Raises EngineError."""
        self._own("init_weights_update_group", "InitWeightsUpdateGroupReqInput", fields)

    def update_weights_from_distributed(self, **fields: object) -> None:
        """Make SGLang's own call. Afterwards weights do not match the served version.

        The caller has to drop SGLang's caches. Raises EngineError.
        """
        self._asked("update_weights_from_distributed", lambda server: server.update_from_group(**fields))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:  # noqa: ANN401 - SGLang's
        """Make SGLang's own call: a tensor's first rows as floats, by the name in the checkpoint.

        Only few of SGLang's models support this call, such as Llama; other models return None.
        """
        fields = {"name": name, "truncate_size": truncate_size}
        return self._own("get_weights_by_name", "GetWeightsByNameReqInput", fields)

    def checksums(self) -> list[Mapping[str, Any]]:
        """Return SGLang's own ``checksums`` of each rank, by live tensor. Raises EngineError."""
        _, _, ranks, *_ = self._own("check_weights", "CheckWeightsReqInput", {"action": "checksum"})
        return list(ranks)

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release memory. SGLang must hold no requests, so ``keep`` lets them end."""
        super().sleep(level, "wait" if mode == "keep" else mode, timeout_s)

    def close(self) -> None:
        """End SGLang's processes and the connections. Safe to call twice."""
        if self._watch:
            self._watch.close()
        if not self.loop.thread.close(_END_S):
            logger.warning("[engine %s] does not end", self._name)
        self._replies.close()

    def _params(self, settings: Sampling, index: int) -> Params:
        if settings.seed is not None and not self._seeds:
            raise ConfigError(
                "sampling.seed",
                settings.seed,
                "SGLang draws by seeds only when started with options.enable_deterministic_inference",
            )
        if self._seeds and (min_p := settings.passed.get("min_p")):
            remedy = "leave it out: with options.enable_deterministic_inference, SGLang's process would end"
            raise ConfigError("sampling.min_p", min_p, remedy)
        stops = settings.stop_token_ids if settings.ignore_eos else ()  # else SGLang stops there itself
        return Params(sampling_params(settings, index, self._seeds), frozenset(stops))

    def _run(self, prompt: Sequence[int], settings: Adapted) -> None:
        self.loop.complete([prompt], [Params(settings)])

    def _adapted(self, name: str, served: ServedAdapter, settings: Mapping[str, Any]) -> Adapted:
        slot = slot_name(name, served.number)
        return Adapted(settings, slot, f"{slot} {served.version}")

    def _sleep_option(self, level: int) -> tuple[str, bool]:
        """Return an option that `level` needs, an unset one if any, and whether it is set."""
        saver, backup = self._sleeps
        lacking = int(saver and level == 1)
        return f"options.{_SLEEP_OPTIONS[lacking]}", backup if lacking else saver

    def _release(self, level: int) -> None:
        if self.loop.num_running:  # SGLang's process would end
            raise StateError(f"engine {self._name} holds frozen requests: resume it first")
        super()._release(level)

    def _asked(self, method: str, work: Any, wait_s: float | None = None) -> Any:  # noqa: ANN401 - SGLang's
        with self._naming(method, FutureTimeoutError):
            return self.loop.call(work, wait_s)


def _ignore_sigquit() -> None:
    """Ignore SIGQUIT, which SGLang's processes send when they fail. `RankWatch` reports failures.

    Uses the C library: Python allows this only on the main thread, where an actor's constructor may not run.
    """
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), _SIG_IGN)


def _stop(server: SglangServer) -> None:
    processes = [RankProcess.of(-1, pid) for pid in server.pids]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.end()
    deadline = time.monotonic() + _END_S
    while any(process.state() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
