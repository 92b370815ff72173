"""All imports from vLLM: the engine, the layerwise reload, and the layers' storage of parameters.

Sources: vLLM's documentation of ``worker_extension_cls`` and the layerwise reload; vLLM's code of 0.24 to
0.33.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.loading.wrapped import is_lora
from weightsync.engines.serving.checks import refuse_sizes, require_gpus
from weightsync.engines.serving.sampling import Sampling
from weightsync.errors import ConfigError, nearest

if TYPE_CHECKING:
    from vllm import EngineArgs, SamplingParams
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_CORE_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
_LATE = "leave it out: a token has the version that serves as it comes"
_FIXED = ("model", "load_format", "worker_extension_cls")
_ONE = {
    "data_parallel_size": "leave it out: register an engine for each replica",
    "pipeline_parallel_size": "leave it out: cut the model by tensor_parallel_size",
    "prefill_context_parallel_size": "leave it out: updates of such ranks are not tested",
    "nnodes": "leave it out: an engine's ranks are on one host",
    "stream_interval": _LATE,
}
"""Sizes that are 1, with remedies."""
_SHORT_SPECULATIVE = ("spec_method", "spec_model", "spec_tokens")
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods that speculate without a draft model."""
_OTHER_LOGPROBS = "leave it out: a rollout has the log-probability of each sampled token"
_REFUSED = {
    **dict.fromkeys(("output_kind", "stream_interval"), _LATE),
    **dict.fromkeys(("skip_clone", "output_text_buffer_length"), "leave it out: vLLM sets it"),
}
"""Settings that are refused, with remedies."""
_FULL_CACHES = ("auto", "bfloat16", "float16")
_SLEEPS = "cumem"
"""vLLM's own mechanism to release device memory. Plug-ins may bring others."""


class ModelRunner(Protocol):
    """The attributes of vLLM's ``GPUModelRunner`` that are used here, in both versions of the class."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    eplb_state: Any

    def get_model(self) -> torch.nn.Module: ...
    def get_draft_model(self) -> torch.nn.Module | None: ...


def set_environment() -> None:
    """Set vLLM's environment variables before vLLM is imported. Variables that the user has set stay."""
    # Run vLLM's scheduler in this process, so that calls fail at once if a worker is dead.
    os.environ.setdefault(_CORE_APART, "0")
    # Spawn the workers of several ranks, since a fork would lose this process's threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not _runs_flashinfer():
        # By default vLLM samples with FlashInfer on NVIDIA GPUs, and does not start if it cannot.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def _runs_flashinfer() -> bool:
    """Return True if FlashInfer is here, with compiled kernels or the compiler that it looks for."""
    if not importlib.util.find_spec("flashinfer"):
        return False
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvccs = (f"{home}/bin/nvcc",) if home else ("nvcc", "/usr/local/cuda/bin/nvcc")
    compiles = any(map(shutil.which, nvccs)) and shutil.which("ninja")
    return bool(compiles or importlib.util.find_spec("flashinfer_jit_cache"))


def require_core_here() -> None:
    """Raise ConfigError if vLLM's core would run in another process."""
    if (value := os.environ.get(_CORE_APART)) != "0":
        remedy = "give 0: tokens that such a core made before a pause come after it, with the next version"
        raise ConfigError(_CORE_APART, value, remedy)


def engine_args(model_path: str, options: Mapping[str, Any], worker: str) -> EngineArgs:
    """Return arguments of an engine with dummy weights, and `worker` mixed into the workers.

    Raises:
        ConfigError: an option that vLLM does not have or cannot be updated with, a dtype that vLLM's platform
            cannot store, or more ranks than this process sees GPUs.
    """
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    known = {spec.name for spec in dataclasses.fields(EngineArgs)} - set(_FIXED)
    for key, value in options.items():
        if key in _SHORT_SPECULATIVE and value is not None:
            raise ConfigError(f"options.{key}", value, "give it in options.speculative_config")
        if key not in known:
            raise ConfigError(f"options.{key}", value, nearest(key, known))
    refuse_sizes(options, _ONE)
    if current_platform.is_cpu() and options.get("enable_expert_parallel"):
        remedy = "leave it out: on CPUs vLLM's kernel reads experts that a rank does not have"
        raise ConfigError("options.enable_expert_parallel", True, remedy)
    folder = ModelFolder(model_path, bool(options.get("trust_remote_code")), options.get("revision"))
    settings = {"dtype": "auto", **options}
    settings.setdefault("skip_tokenizer_init", not (options.get("tokenizer") or folder.has_tokenizer()))
    settings.setdefault("disable_log_stats", not settings.get("speculative_config"))  # it counts drafts there
    if speculative := settings.get("speculative_config"):
        settings["speculative_config"] = _from_own_files(speculative)
    if settings.get("enable_eplb"):
        settings["eplb_config"] = _balancer_settings(settings.get("eplb_config") or {})
    if current_platform.is_cpu():
        settings.setdefault("enforce_eager", True)
    if settings.get("tensor_parallel_size", 1) > 1:
        # Inside a Ray placement group, vLLM would start ranks as actors elsewhere in the group.
        settings.setdefault("distributed_executor_backend", "mp")
    check_sleep(settings, current_platform.is_sleep_mode_available())
    if current_platform.is_cuda() and settings.get("distributed_executor_backend") != "ray":
        require_gpus(settings.get("tensor_parallel_size", 1))
    if settings["dtype"] == "auto":
        # vLLM's own "auto" turns float32 into bfloat16.
        dtype = folder.config().dtype
        settings["dtype"] = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    held = [str(dtype).removeprefix("torch.") for dtype in current_platform.supported_dtypes]
    if settings["dtype"] not in ("auto", *held):
        raise ConfigError(
            "options.dtype", settings["dtype"], f"vLLM on this platform holds {', '.join(held)}"
        )
    return EngineArgs(model=model_path, load_format="dummy", worker_extension_cls=worker, **settings)


def _balancer_settings(given: object) -> object:
    """Return the load balancer's settings. vLLM's defaults copy experts through the host's memory."""
    if not isinstance(given, Mapping):
        return given
    settings = {"use_async": False, "communicator": "pynccl", **given}
    require_moves_between_steps(settings["use_async"])
    return settings


def require_moves_between_steps(use_async: bool) -> None:
    """Raise ConfigError if vLLM moves experts in the background."""
    if use_async:
        remedy = "give false: vLLM would copy experts of an old version while an update writes a new one"
        raise ConfigError("options.eplb_config.use_async", True, remedy)


def _from_own_files(speculative: object) -> dict[str, Any]:
    """Return a speculative configuration that loads a draft from files, not as the target's dummy.

    If vLLM's second model runner ignores this, the environment is set to choose the first model runner.
    """
    from vllm.config import LoadConfig, SpeculativeConfig
    from vllm.model_executor.model_loader import utils as loaders

    if not isinstance(speculative, Mapping):
        remedy = "give a mapping with method, num_speculative_tokens and, for a draft, model"
        raise ConfigError("options.speculative_config", speculative, remedy)
    given = speculative.get("draft_load_config")
    asked = given.get("load_format") if isinstance(given, Mapping) else getattr(given, "load_format", None)
    if asked == "dummy":
        remedy = "leave it out: a draft is loaded from its own checkpoint"
        raise ConfigError("options.speculative_config.draft_load_config", asked, remedy)
    known = {spec.name for spec in dataclasses.fields(SpeculativeConfig)}
    if given or speculative.get("method") in WITHOUT_WEIGHTS or "draft_load_config" not in known:
        return dict(speculative)
    if not hasattr(loaders, "get_draft_load_config"):
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return {**speculative, "draft_load_config": LoadConfig()}


def model_folder(config: ModelConfig) -> ModelFolder:
    """Return the place of a model's own configuration. vLLM changes a copy when it starts."""
    given: Any = config.hf_overrides
    overrides, change = ({}, given) if callable(given) else (given, None)
    path, revision = config.hf_config_path or config.model, config.revision
    return ModelFolder(path, config.trust_remote_code, revision, overrides, change)


@contextlib.contextmanager
def building(config: VllmConfig) -> Iterator[None]:
    """Have transformers build models outside of vLLM, which decorates classes for its backend."""
    from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config

    uncompiled = copy.copy(config)
    uncompiled.compilation_config = CompilationConfig(mode=CompilationMode.NONE)
    with set_current_vllm_config(uncompiled):
        yield


def draft_files(draft: torch.nn.Module, config: ModelConfig) -> Iterable[tuple[str, torch.Tensor]]:
    """Read a draft's checkpoint, as vLLM does by default."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return DefaultModelLoader(LoadConfig()).get_all_weights(config, draft)  # type: ignore[no-any-return,unused-ignore]


def file_headers(config: ModelConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return dtype and shape of each tensor in a checkpoint's safetensors files, by name."""
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    return get_safetensors_params_metadata(config.model, revision=config.revision)  # type: ignore[no-any-return,unused-ignore]


def require_one_replica(config: VllmConfig) -> None:
    """Raise ConfigError if there are several replicas, or if a rank only has some of the layers."""
    parallel = config.parallel_config
    refuse_sizes({key: getattr(parallel, key, 1) for key in _ONE}, _ONE)


def require_one_core(llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
    """Raise ConfigError if an ``AsyncLLM`` has several cores.

    It returns the answers of one core. The cores of a dense model do not know of one another.
    """
    cores = getattr(getattr(llm, "engine_core", None), "core_engines", ())
    if len(cores) > 1:
        raise ConfigError("data_parallel_size", len(cores), _ONE["data_parallel_size"])


def require_no_draft(config: VllmConfig) -> None:
    """Raise ConfigError if a draft would keep other weights than the target, and nobody would know."""
    speculative = config.speculative_config
    if speculative and speculative.method not in WITHOUT_WEIGHTS:
        value = {"method": speculative.method, "model": speculative.model}
        remedy = "leave it out, or speculate with ngram or suffix: updates reach the target model alone"
        raise ConfigError("speculative_config", value, remedy)


def require_updatable(config: VllmConfig, model: torch.nn.Module) -> None:
    """Raise ConfigError if an update would leave some weights unchanged, or break them.

    A draft model is not looked at.
    """
    _require_known(config)
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight"):
            _require_unpadded(name, module, config.model_config.model)
        if "MoE" in type(module).__name__ and is_lora(module):
            _require_experts(name, module, config)
        if _has_drawn_scales(module) and config.load_config.load_format == "dummy":
            remedy = (
                f"use auto: the scales of {name} were drawn at random for the start, and no update sets them"
            )
            raise ConfigError("kv_cache_dtype", str(module.kv_cache_dtype), remedy)
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            remedy = f"oneDNN would use freed scales in {name} after a reload: serve this format on a GPU"
            raise ConfigError("quantization", config.model_config.quantization, remedy)


def _require_known(config: VllmConfig) -> None:
    """Raise ConfigError for options of newer versions that an update, or a sleep, would break."""
    head = getattr(config.speculative_config, "draft_lm_head_quantization", None)
    if head is not None:
        remedy = "leave it out: the draft's quantised copy of the target's head would keep its old weights"
        raise ConfigError("speculative_config.draft_lm_head_quantization", head, remedy)
    backend = getattr(config.model_config, "sleep_mode_backend", _SLEEPS)
    if backend != _SLEEPS:
        raise ConfigError("sleep_mode_backend", backend, f"use {_SLEEPS}: no other sleep is known here")


def _require_experts(name: str, module: torch.nn.Module, config: VllmConfig) -> None:
    """Raise ConfigError if experts that adapters may have could not be updated, or not be run."""
    if any(each.device.type == "cpu" for each in module.parameters()):
        remedy = f"serve it on a GPU, or leave it out: vLLM's kernel for adapters of {name} is not for CPUs"
        raise ConfigError("enable_lora", True, remedy)
    quantization = config.model_config.quantization
    if quantization is not None:
        remedy = f"leave enable_lora out: with it, no update of the quantised {name} is proven"
        raise ConfigError("quantization", quantization, remedy)


def _require_unpadded(name: str, module: torch.nn.Module, path: str) -> None:
    """Raise ConfigError if vLLM has padded experts, as on a CPU, since a reload does not pad again."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded: torch.Tensor | None = get_layerwise_info(module).restore_metadata[0].get("w13_weight")
    served: Any = module.w13_weight
    if loaded is not None and served.dtype == loaded.dtype and served.numel() != loaded.numel():
        rows = loaded.shape[1] // 2
        remedy = (
            f"vLLM pads the {rows} rows that a rank has of each expert in {name}, and no update could: have "
            "moe_intermediate_size / tensor_parallel_size a multiple of 32, or serve this model on a GPU"
        )
        raise ConfigError("model", path, remedy)


def _has_drawn_scales(module: torch.nn.Module) -> bool:
    """Return True if a quantized cache has scales other than vLLM's default.

    vLLM takes a positive dummy scale for one of a checkpoint. Other caches ignore their scales.
    """
    if getattr(module, "kv_cache_dtype", "auto") in _FULL_CACHES:
        return False
    return any(getattr(module, name, 1.0) != 1.0 for name in ("_k_scale_float", "_v_scale_float"))


@functools.cache
def pause_waits() -> bool:
    """Return True if a pause of this vLLM waits for the last step on all ranks' devices, as from 0.31 on."""
    if not importlib.util.find_spec("vllm"):
        return False
    from vllm.v1.worker.worker_base import WorkerBase

    return hasattr(WorkerBase, "synchronize_device")


def sleeps_half_awake() -> bool:
    """Return True if this vLLM obeys a sleep call while only its caches sleep, as from 0.31 on."""
    if not importlib.util.find_spec("vllm"):
        return False
    from vllm.v1.executor import abstract

    return hasattr(abstract, "SLEEP_TAGS")


def asleep() -> set[str]:
    """Return the parts of this worker's memory that sleep. Older versions of vLLM do not say it."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    held = allocator.pointer_to_data.values() if allocator else ()
    return {each.tag for each in held if getattr(each, "is_asleep", False)}


def check_sleep(settings: dict[str, Any], available: bool) -> None:
    """Raise ConfigError if vLLM could not sleep, or not wake."""
    if not settings.get("enable_sleep_mode"):
        return
    if not available:
        raise ConfigError("options.enable_sleep_mode", True, "leave it out: vLLM sleeps on GPUs")
    if not settings.setdefault("disable_custom_all_reduce", True):
        remedy = "leave it out: those buffers cannot be shared in the memory that sleeps"
        raise ConfigError("options.disable_custom_all_reduce", False, remedy)


def start(arguments: EngineArgs) -> LLMEngine:
    """Start vLLM, which takes from seconds to minutes.

    Raises ConfigError with vLLM's own words if options do not fit together or with the model.
    """
    from pydantic import ValidationError
    from vllm.v1.engine.llm_engine import LLMEngine

    # Without Triton, vLLM looks through all loaded modules and fails on this module's `lib`. Numba, which
    # computes our digests, has loaded this module; users of the module keep their own references.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        engine = LLMEngine.from_engine_args(arguments)
        _compile_logprobs(engine.model_config.get_vocab_size())
        return engine
    except ValidationError as error:
        says = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError("options", arguments.model, f"vLLM says of it: {says}") from error
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def _compile_logprobs(vocab_size: int) -> None:
    """On a CPU, compile vLLM's ranking of log-probabilities: the first request would wait for that."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    for rows in (1, 2) if current_platform.is_cpu() else ():  # the second size leaves their number open
        batched_count_greater_than(torch.zeros(rows, vocab_size), torch.zeros(rows, 1))


def lora_request(name: str, number: int) -> LoRARequest:
    """Return the setting with which the adapter in slot `number` answers a request."""
    from vllm.lora.request import LoRARequest

    # A path is needed. It is not read while the adapter has a slot, and must not name an adapter on a model
    # hub.
    return LoRARequest(name, number, "/nonexistent/weightsync")


def lora_model(manager: Any, number: int, rank: int, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Return an adapter as vLLM's loader reads it from files. Scaling is 1: `tensors` are scaled."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=getattr(mapper, "get_rename_mapper", lambda: mapper)(),
    )
    for layer in lora.loras.values():
        layer.scaling = 1
    return lora


def stop(engine: LLMEngine) -> None:
    """End vLLM and the worker processes."""
    engine.engine_core.shutdown()


def sampling_params(settings: Sampling, index: int) -> SamplingParams:
    """Return vLLM's parameters for completion number `index` of a call.

    Raises ConfigError for a setting or a value that vLLM does not know.
    """
    from vllm import SamplingParams

    known = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    others = {name: _OTHER_LOGPROBS for name in known if "logprobs" in name or "logprob_" in name}
    settings.require_known(known, {**_REFUSED, **others})
    values = {
        "detokenize": bool(settings.stop),
        **settings.passed,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": None if settings.seed is None else settings.seed + index,
        "stop_token_ids": list(settings.stop_token_ids),
        "stop": settings.stops,
        "ignore_eos": settings.ignore_eos,
        "logprobs": 0 if settings.logprobs else None,
    }
    try:
        return msgspec.convert(values, SamplingParams)
    except Exception as error:  # vLLM raises its own kinds
        raise settings.refusal("vLLM", error) from error


def loaded_layers(model: torch.nn.Module) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the parameters that vLLM's loader fills, before it processes them, by the paths of modules."""
    return {
        path: layerwise().get_layerwise_info(each).restore_metadata[0] for path, each in model.named_modules()
    }


def packed_layers(model: torch.nn.Module) -> Mapping[str, list[str]]:
    """Return the layers that are one for several of a checkpoint, by the last parts of their names."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return packed


def expert_rank() -> int:
    """Return this process's place among the ranks that share experts."""
    from vllm.distributed.parallel_state import get_ep_group

    return int(get_ep_group().rank_in_group)


def layerwise() -> Any:  # noqa: ANN401 - vLLM's module
    """Return the functions of vLLM's layerwise reload."""
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise


def materialized(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for a parameter or buffer on the meta device, with equal class and attributes."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    with device:
        return materialize_meta_tensor(tensor)  # type: ignore[no-any-return,unused-ignore]
