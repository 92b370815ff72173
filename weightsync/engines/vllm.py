"""vLLM behind its public hooks: a worker extension, ``collective_rpc`` and layerwise reload.

Facts about those hooks: vLLM's documentation of ``worker_extension_cls`` and of the layerwise
reload, and its sources of 0.24 to 0.33.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.engines.base import Rollout
from weightsync.engines.missing import Missing
from weightsync.engines.sampling import Sampling
from weightsync.engines.vllm_loop import EngineLoop
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError, WeightSyncError, nearest
from weightsync.feed import EngineFeed
from weightsync.modules import named_tensors
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.verify import tensor_digest

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import ModelConfig
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan
    from weightsync.verify import Digests

__all__ = ["VllmEngine", "WeightSyncWorker"]

_BATCH_NBYTES = 64 << 20
_FIXED = ("model", "load_format", "worker_extension_cls")


class VllmEngine:
    """One vLLM engine; with one rank, engine and worker live in this process.

    `options` are arguments of vLLM's ``EngineArgs``; those of `_FIXED` are set here. ``dtype`` is
    by default the one that the model's config names, float32 too.

    Raises:
        ConfigError: an option that vLLM has not, or a dtype that its platform cannot hold; named
            as ``options.<field>``.
    """

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        """Start vLLM with the model's config and dummy weights."""
        self._name = name
        self._whole = False
        _set_environment(single=_world_size(options) == 1)
        arguments = _engine_args(model_path, options)
        self._loop = EngineLoop(name, lambda: _start(arguments), _stop)

    def layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`. Every rank takes whole tensors: vLLM's loader cuts its own shard."""
        return self._on_ranks("layout")

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[str]:
        """See `Engine.attach`."""
        return self._on_ranks("attach", plan, tuple(tickets), timeout_s)

    def pause(self, mode: str, timeout_s: float) -> None:
        """See `Engine.pause`."""
        self._loop.freeze(mode, timeout_s)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """See `Engine.load`; the digests are of the tensors handed to vLLM's loader."""
        if not self._loop.frozen:
            raise StateError(f"engine {self._name} is serving: pause it first")
        self._whole = False
        try:
            digests = self._on_ranks("load", attempt, timeout_s)
        except WeightSyncError:
            self._loop.void()
            raise
        self._whole = True
        return digests

    def resume(self, version: int) -> None:
        """See `Engine.resume`. Raises StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
        self._loop.thaw(version)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Rollout:
        """See `Engine.generate`; requests of concurrent calls share vLLM's batches."""
        from vllm import SamplingParams

        settings = Sampling.of(sampling)
        params = [
            SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=None if settings.seed is None else settings.seed + index,
                stop_token_ids=list(settings.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        done = self._loop.complete(prompts, params)
        return Rollout([each.tokens for each in done], [each.versions for each in done])

    def close(self) -> None:
        """See `Engine.close`."""
        self._loop.close()

    def _on_ranks(self, method: str, *args: object) -> list[Any]:
        # Bytes of our own pickling pass between vLLM's processes without its insecure mode.
        blob = pickle.dumps((method, args))
        replies = self._loop.call(lambda engine: engine.collective_rpc("ws_call", args=(blob,)))
        outcomes = [pickle.loads(reply) for reply in replies]
        for outcome in outcomes:
            if isinstance(outcome, WeightSyncError):
                raise outcome
        return outcomes


class WeightSyncWorker:
    """Mixed into vLLM's worker class, so it may hold no name that the worker has."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: GPUModelRunner
        _ws_rank: _Rank

    def ws_call(self, blob: bytes) -> bytes:
        """Call a method of this worker's `_Rank`; answers with its result or its WeightSyncError."""
        if not hasattr(self, "_ws_rank"):
            self._ws_rank = _Rank(self.rank, self.device, self.model_runner)
        method, args = pickle.loads(blob)
        try:
            outcome = getattr(self._ws_rank, method)(*args)
        except WeightSyncError as error:
            outcome = error
        return pickle.dumps(outcome)


class _Rank:
    """One rank's side, in the process that owns its parameters."""

    def __init__(self, rank: int, device: torch.device, model_runner: GPUModelRunner) -> None:
        self._rank, self._device = rank, device
        self._model, self._config = model_runner.model, model_runner.model_config
        self._feed: EngineFeed | None = None
        self._plan: Plan | None = None
        self._engine = ""

    def layout(self) -> RankLayout:
        """Names and shapes of transformers' model of the same config.

        No live buffers: vLLM fuses, slices and repacks, so our plan cannot prove their coverage.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config.hf_config, dtype=self._config.dtype)
        tensors, tied = named_tensors(model)
        metas = tuple(
            TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        return RankLayout(metas, tuple(map(_whole, metas)), tied)

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> str:
        self.close()
        ticket = tickets[self._rank]
        self._feed, self._plan, self._engine = EngineFeed.open(ticket, plan, timeout_s), plan, ticket.engine
        return plan.digest()

    def load(self, attempt: int, timeout_s: float) -> Digests:
        if self._feed is None or self._plan is None:
            raise StateError("a rank is not attached: connect first")
        sink = _ReloadSink(self._plan, self._model, self._config, self._device)
        try:
            return self._feed.receive(attempt, sink, timeout_s)
        except WeightSyncError as error:
            sink.abandon()
            if isinstance(error, DeadlineError | EngineError):
                raise
            raise EngineError(self._engine, "load", str(error)) from error

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class _ReloadSink:
    """Puts pieces together and hands whole tensors to vLLM's loader, in a layerwise reload."""

    def __init__(self, plan: Plan, model: torch.nn.Module, config: ModelConfig, device: torch.device) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._plan, self._model, self._config, self._device = plan, model, config, device
        self._expected = (
            {name for name, _ in model.named_parameters()} if config.quantization is None else set()
        )
        self._missing = Missing(plan)
        self._parts: dict[int, torch.Tensor] = {}
        self._batch: list[tuple[str, torch.Tensor]] = []
        self._batch_nbytes = 0
        self._loaded: set[str] = set()
        self._digests = np.zeros(len(plan.tensors), dtype=np.uint64)
        with torch.device(device):
            initialize_layerwise_reload(model)

    def write(self, tensor: int, box: Box, data: torch.Tensor) -> None:
        shape = self._plan.tensors[tensor].shape
        if tensor not in self._parts:
            # Memory of its own: the loader keeps tensors until a module is complete.
            self._parts[tensor] = torch.empty(shape, dtype=data.dtype, device=self._device)
        self._parts[tensor][box.slices()].copy_(data)
        if self._missing.take(tensor, box):
            self._add(tensor, self._parts.pop(tensor))

    def finish(self) -> Digests:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._missing.require_none()
        self._hand_over()
        if unloaded := sorted(self._expected - self._loaded):
            raise RuntimeError(
                f"vLLM's loader left out {', '.join(unloaded[:3])} of {len(unloaded)} parameters"
            )
        with torch.no_grad(), torch.device(self._device):
            finalize_layerwise_reload(self._model, self._config)
            if self._device.type == "cpu":
                _pack_again(self._model)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return self._digests

    def abandon(self) -> None:
        """Leave the reload, so that the next one starts afresh; the weights are a mix then."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # A module that vLLM holds half-loaded is skipped by the next start and would count on.
        for module in self._model.modules():
            info = get_layerwise_info(module)
            info.load_numel = 0
            info.loaded_weights.clear()
        with torch.no_grad(), torch.device(self._device):
            finalize_layerwise_reload(self._model, self._config)

    def _add(self, tensor: int, data: torch.Tensor) -> None:
        meta = self._plan.tensors[tensor]
        self._digests[tensor] = tensor_digest(data, meta.shape)
        self._batch.append((meta.name, data))
        self._batch_nbytes += meta.nbytes
        if self._batch_nbytes >= _BATCH_NBYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        with torch.no_grad(), torch.device(self._device):
            self._loaded |= self._model.load_weights(iter(self._batch))  # type: ignore[operator]
        self._batch, self._batch_nbytes = [], 0


def _pack_again(model: torch.nn.Module) -> None:
    """Repeat what a reload leaves as first packed for the CPU: experts, and a head tied to the embedding."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "w13_weight"):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():  # type: ignore[operator]
            method.process_weights_after_loading(module)


def _whole(meta: TensorMeta) -> Segment:
    strides = tuple(stride * meta.itemsize for stride in torch.empty(meta.shape, device="meta").stride())
    return Segment(meta.name, Box((0,) * len(meta.shape), meta.shape), meta.name, 0, strides)


def _world_size(options: Mapping[str, Any]) -> int:
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))


def _set_environment(*, single: bool) -> None:
    """Before vLLM is imported; what the user has set stays."""
    if single:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def _engine_args(model_path: str, options: Mapping[str, Any]) -> EngineArgs:
    from transformers import AutoConfig
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    known = {spec.name for spec in dataclasses.fields(EngineArgs)} - set(_FIXED)
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"options.{key}", value, nearest(key, known))
    settings = {"dtype": "auto", "skip_tokenizer_init": True, "disable_log_stats": True, **options}
    if current_platform.is_cpu():
        settings.setdefault("enforce_eager", True)
    if settings["dtype"] == "auto":
        # vLLM's own "auto" turns float32 into bfloat16.
        dtype = AutoConfig.from_pretrained(model_path).dtype
        settings["dtype"] = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    held = [str(dtype).removeprefix("torch.") for dtype in current_platform.supported_dtypes]
    if settings["dtype"] not in ("auto", *held):
        raise ConfigError(
            "options.dtype", settings["dtype"], f"vLLM on this platform holds {', '.join(held)}"
        )
    worker = f"{WeightSyncWorker.__module__}.{WeightSyncWorker.__qualname__}"
    return EngineArgs(model=model_path, load_format="dummy", worker_extension_cls=worker, **settings)


def _start(arguments: EngineArgs) -> LLMEngine:
    from vllm.v1.engine.llm_engine import LLMEngine

    # Where Triton is missing, vLLM looks through all loaded modules and trips over this one's `lib`.
    # Numba, that computes our digests, has loaded it; who uses it has his own reference.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        return LLMEngine.from_engine_args(arguments)
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def _stop(engine: LLMEngine) -> None:
    engine.collective_rpc("ws_call", args=(pickle.dumps(("close", ())),))
    engine.engine_core.shutdown()
