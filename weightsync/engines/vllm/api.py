"""All that we import from vLLM: its engine, its layerwise reload, and what says how parameters are stored.

Facts about these: vLLM's documentation of ``worker_extension_cls`` and of the layerwise reload, and
its sources of 0.24 to 0.33.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

from weightsync.engines.checks import require_gpus
from weightsync.engines.loader_fill import FillCount, ToFill
from weightsync.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vllm import EngineArgs, SamplingParams
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    from weightsync.engines.sampling import Sampling

__all__ = [
    "LoadAccount",
    "ModelRunner",
    "Reload",
    "engine_args",
    "loader_names",
    "require_updatable",
    "sampling_params",
    "set_environment",
    "start",
    "stop",
    "stored_otherwise",
]

_FIXED = ("model", "load_format", "worker_extension_cls")
_SPECULATIVE = ("speculative", "spec_", "draft")
_NO_DRAFT = (
    "leave speculative decoding out: updates reach the target model alone, a draft would keep other weights"
)
# They keep parameters as their loaders write them. Mixture-of-experts layers: by their backend.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_FROM_CONFIG = ("input_scale_ub",)
_EXPERTS_METHOD, _PLAIN_BACKENDS = "UnquantizedFusedMoEMethod", ("TRITON", "BATCHED_TRITON")


class ModelRunner(Protocol):
    """What is used of vLLM's ``GPUModelRunner``, both versions of it."""

    vllm_config: VllmConfig
    model_config: ModelConfig

    def get_model(self) -> torch.nn.Module: ...


def set_environment() -> None:
    """Before vLLM is imported; what the user has set stays."""
    # vLLM's scheduler in this process: a dead worker then fails the call that waits for it at once.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Workers of several ranks: this process has threads, which a fork would leave behind.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not importlib.util.find_spec("flashinfer"):
        # By default vLLM takes it for granted on NVIDIA GPUs, and fails to start without it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def engine_args(model_path: str, options: Mapping[str, Any], worker: str) -> EngineArgs:
    """Arguments of an engine that starts with dummy weights and `worker` mixed into its workers.

    Raises:
        ConfigError: an option that vLLM has not, or that it cannot be updated with, a dtype that its platform
            cannot hold, or more ranks than this process sees GPUs.
    """
    from transformers import AutoConfig
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    known = {spec.name for spec in dataclasses.fields(EngineArgs)} - set(_FIXED)
    for key, value in options.items():
        # Also by names that other versions of vLLM have for it.
        if value is not None and (key.startswith(_SPECULATIVE) or key == "num_speculative_tokens"):
            raise ConfigError(f"options.{key}", value, _NO_DRAFT)
        if key not in known:
            raise ConfigError(f"options.{key}", value, nearest(key, known))
    settings = {"dtype": "auto", "skip_tokenizer_init": True, "disable_log_stats": True, **options}
    if current_platform.is_cpu():
        settings.setdefault("enforce_eager", True)
    if max(settings.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")) > 1:
        # In one of Ray's placement groups, vLLM would have its ranks be actors elsewhere in the group.
        settings.setdefault("distributed_executor_backend", "mp")
    check_sleep(settings, current_platform.is_sleep_mode_available())
    if current_platform.is_cuda() and settings.get("distributed_executor_backend") != "ray":
        require_gpus(settings.get("tensor_parallel_size", 1))
    if settings["dtype"] == "auto":
        # vLLM's own "auto" turns float32 into bfloat16.
        dtype = AutoConfig.from_pretrained(model_path).dtype
        settings["dtype"] = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    held = [str(dtype).removeprefix("torch.") for dtype in current_platform.supported_dtypes]
    if settings["dtype"] not in ("auto", *held):
        raise ConfigError(
            "options.dtype", settings["dtype"], f"vLLM on this platform holds {', '.join(held)}"
        )
    return EngineArgs(model=model_path, load_format="dummy", worker_extension_cls=worker, **settings)


def require_updatable(config: VllmConfig, model: torch.nn.Module) -> None:
    """Raises ConfigError for an engine in which an update would leave weights as they were, or break them.

    Speculative decoding may be a checkpoint's own wish: vLLM then loads the draft without being asked.
    """
    if speculative := config.speculative_config:
        value = {"method": speculative.method, "model": speculative.model}
        raise ConfigError("speculative_config", value, _NO_DRAFT)
    for name, module in model.named_modules():
        if "MoE" in type(module).__name__ and _is_lora(module):
            remedy = (
                f"leave it out: adapters of experts replace the kernels of {name}, so no update is proven"
            )
            raise ConfigError("enable_lora", True, remedy)
        if _has_drawn_scales(module) and config.load_config.load_format == "dummy":
            remedy = (
                f"use auto: the scales of {name} were drawn at random for the start, and no update sets them"
            )
            raise ConfigError("kv_cache_dtype", str(module.kv_cache_dtype), remedy)
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            remedy = f"oneDNN would use freed scales in {name} after a reload: serve this format on a GPU"
            raise ConfigError("quantization", config.model_config.quantization, remedy)


def _has_drawn_scales(module: torch.nn.Module) -> bool:
    """Whether a quantized cache has scales other than vLLM's default.

    vLLM takes a dummy scale for a checkpoint's where it is positive.
    """
    return any(getattr(module, name, 1.0) != 1.0 for name in ("_k_scale_float", "_v_scale_float"))


def check_sleep(settings: dict[str, Any], available: bool) -> None:
    """Raises ConfigError where vLLM could not sleep, or not wake."""
    if not settings.get("enable_sleep_mode"):
        return
    if not available:
        raise ConfigError("options.enable_sleep_mode", True, "leave it out: vLLM sleeps on GPUs")
    if not settings.setdefault("disable_custom_all_reduce", True):
        remedy = "leave it out: those buffers cannot be shared in the memory that sleeps"
        raise ConfigError("options.disable_custom_all_reduce", False, remedy)


def start(arguments: EngineArgs) -> LLMEngine:
    """Start vLLM; takes from seconds to minutes."""
    from vllm.v1.engine.llm_engine import LLMEngine

    # Where Triton is missing, vLLM looks through all loaded modules and trips over this one's `lib`.
    # Numba, that computes our digests, has loaded it; who uses it has his own reference.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        return LLMEngine.from_engine_args(arguments)
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def stop(engine: LLMEngine) -> None:
    """End vLLM and its worker processes."""
    engine.engine_core.shutdown()


def sampling_params(settings: Sampling, index: int) -> SamplingParams:
    """Of the prompt number `index` of a call."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=None if settings.seed is None else settings.seed + index,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
    )


def stored_otherwise(runner: ModelRunner, device: torch.device) -> str:
    """Why the live parameters may hold other bytes than the loader writes; empty if they hold the same.

    Only what is known to keep them is let through: on GPUs, without quantization, offloading and
    moving experts, layers that use their weights as they were loaded.
    """
    config = runner.vllm_config
    if device.type != "cuda":
        return f"on {device.type}, vLLM packs weights"
    if runner.model_config.quantization is not None:
        return f"the weights are quantized ({runner.model_config.quantization})"
    if config.parallel_config.enable_eplb:
        return "experts move between ranks (EPLB)"
    model = runner.get_model()
    away = next((name for name, each in model.named_parameters() if each.device != device), None)
    if away:
        return f"{away} does not lie on {device}"
    reasons = ((name, _why_not_plain(module)) for name, module in model.named_modules())
    return next((f"{name}: {reason}" for name, reason in reasons if reason), "")


def _why_not_plain(module: torch.nn.Module) -> str:
    method = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if method is not None and kind == _EXPERTS_METHOD:
        backend: str = method.unquantized_backend.name
        return "" if backend in _PLAIN_BACKENDS else f"backend {backend} rearranges experts"
    if method is not None and kind not in _PLAIN_METHODS:
        return f"{kind} may repack weights"
    # Attention has a hook for quantized caches, a method is its layer's; others derive tensors.
    known = ("Attention", _EXPERTS_METHOD)
    hooked = hasattr(module, "process_weights_after_loading")
    if hooked and not any(cls.__name__ in known for cls in type(module).__mro__):
        return f"{type(module).__name__} processes its weights after loading"
    return ""


def loader_names(model: torch.nn.Module) -> Callable[[str], str]:
    """What a model's loader calls a checkpoint's tensors, where adapters (LoRA) wrap layers.

    A wrapped layer's parameters are called ``….base_layer.weight``. Wrappers of newer versions pass on what
    has the checkpoint's name; for others the name has to say it.
    """
    wrapped = {
        path
        for path, module in model.named_modules()
        if _is_lora(module) and not hasattr(type(module), "load_weights")
    }
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})

    def known_as(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        holders = [last, *(whole for whole, parts in packed.items() if last in parts)]
        inside = any(_join(parent, holder) in wrapped for holder in holders)
        return f"{path}.base_layer.{leaf}" if inside else name

    return known_as


def _is_lora(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("WithLoRA")


class Reload:
    """One layerwise reload: vLLM loads each module aside and copies it into the live parameters."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig, device: torch.device) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model, self._config, self._device = model, config, device
        with torch.device(device):
            initialize_layerwise_reload(self._model)
        self._account = LoadAccount(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand whole tensors to the loader, which keeps them until their module is complete."""
        with torch.no_grad(), torch.device(self._device):
            self._account.load(weights)

    def require_all(self) -> None:
        """See `LoadAccount.require_all`."""
        self._account.require_all()

    def finish(self) -> None:
        """Raises as `require_all`."""
        self.require_all()
        self._finalize()
        if self._device.type == "cpu":
            with torch.no_grad(), torch.device(self._device):
                _pack_again(self._model)

    def abandon(self) -> None:
        """Leave the reload, so that the next one starts afresh; the weights are a mix then."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # A module that vLLM holds half-loaded is skipped by the next start and would count on.
        for module in self._model.modules():
            info = get_layerwise_info(module)
            info.load_numel = 0
            info.loaded_weights.clear()
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad(), torch.device(self._device), _without_failed_to_load():
            finalize_layerwise_reload(self._model, self._config)


_Came = tuple[str, torch.Size, torch.dtype]
"""A checkpoint's tensor that was handed to a loader."""

_WHOLE: WeakKeyDictionary[torch.nn.Module, frozenset[_Came]] = WeakKeyDictionary()
"""What filled a model to the last element: the same tensors do so again, and need not be counted."""


class LoadAccount:
    """A model's ``load_weights``, and what it has filled since the reload began."""

    def __init__(
        self,
        model: torch.nn.Module,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None,
    ) -> None:
        """Begin to count, in a reload that has begun. `load` is by default the model's ``load_weights``."""
        self._model = model
        self._load: Callable[..., object] = load or model.load_weights  # type: ignore[assignment]
        self._known_as = loader_names(model)
        self._expected = _WHOLE.get(model)
        self._count = None if self._expected else FillCount(_to_fill(model))
        self._came: set[_Came] = set()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the loader, by a checkpoint's names."""
        named = list(weights)
        self._came.update((name, tensor.shape, tensor.dtype) for name, tensor in named)
        with self._count or contextlib.nullcontext():
            self._load((self._known_as(name), tensor) for name, tensor in named)

    def require_all(self) -> None:
        """Raises RuntimeError, with names, when a tensor that the loader fills is not full.

        Where other tensors came than those that filled the model before, the next update counts again.
        """
        if self._count:
            missing = self._count.missing(name for name, _, _ in self._came)
        else:
            assert self._expected
            missing = [
                f"{name} {tuple(shape)}" for name, shape, _ in sorted(self._expected - self._came, key=str)
            ]
            if self._came - self._expected:
                missing.append("what was given other names, shapes or dtypes than before")
        if missing:
            _WHOLE.pop(self._model, None)
            some = ", ".join(missing[:3])
            raise RuntimeError(f"vLLM's loader left out {some}: {len(missing)} tensors are not whole")
        _WHOLE[self._model] = frozenset(self._came)


def _to_fill(model: torch.nn.Module) -> dict[str, ToFill]:
    """By name, what a checkpoint has to fill in a reload that has begun.

    Then a module has the parameters that its loader knows, also where it serves others: quantized, packed.
    Left out are those that no checkpoint need have: a second name of a tied parameter, the scales of a cache,
    which have defaults, and what is computed as a module is quantized online.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    wanted: dict[str, ToFill] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        if hasattr(module, "kv_cache_dtype"):
            continue
        served, _ = get_layerwise_info(module).kernel_tensors or (module._parameters, {})
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        for name, parameter in parameters.items():
            first = id(served.get(name, parameter))
            if first not in known and not _is_computed(module, name):
                wanted[_join(path, name)] = ToFill(parameter, _load_numel(parameter))
            known.add(first)
        for name, buffer in module._buffers.items():
            # Of a module with parameters, vLLM replaces those that it loads anew; others keep their values.
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                wanted[_join(path, name)] = ToFill(buffer, _load_numel(buffer), needed=bool(parameters))
    return wanted


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _load_numel(tensor: torch.Tensor) -> int:
    """Without padding that vLLM declares."""
    numel: int = getattr(tensor, "weight_loader_numel", tensor.numel())
    return numel


def _is_computed(module: torch.nn.Module, name: str) -> bool:
    if name in _FROM_CONFIG:
        return True
    # Methods that quantize what a checkpoint has in full precision, by their names in 0.24 to 0.33.
    method = type(getattr(module, "quant_method", None)).__name__
    return name.endswith("_scale") and ("Online" in method or method == "ExpertsInt8MoEMethod")


@contextlib.contextmanager
def _without_failed_to_load() -> Iterator[None]:
    """Keep vLLM from warning of modules without weights, such as rotary embeddings, at each update.

    What was to be loaded has been accounted for by then.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    def passes(record: logging.LogRecord) -> bool:
        return record.msg != "%s: Failed to load weights"

    layerwise.logger.addFilter(passes)
    try:
        yield
    finally:
        layerwise.logger.removeFilter(passes)


def _pack_again(model: torch.nn.Module) -> None:
    """Repeat what a reload leaves as first packed for the CPU: experts, and a head tied to the embedding."""
    for module in model.modules():
        if _is_lora(module):
            continue  # it has its layer's attributes
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "w13_weight"):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():  # type: ignore[operator]
            method.process_weights_after_loading(module)
