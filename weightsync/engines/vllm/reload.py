"""One update through vLLM's layerwise reload, and the account of the tensors that the loader filled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weightsync.engines.loading.kernel_state import KernelState, VolatileBuffers
from weightsync.engines.loading.load_witness import LoadWitness
from weightsync.engines.loading.loader_fill import FillCount, ToFill, storage_number
from weightsync.engines.loading.wrapped import is_lora, unwrapped
from weightsync.engines.vllm.api import layerwise, materialized
from weightsync.errors import ConfigError
from weightsync.memory.stacked_experts import as_loaded
from weightsync.plan import TensorMeta
from weightsync.plan.layout.segment import CASTABLE

_NEVER_WHOLE = -(1 << 60)
_FROM_CONFIG = ("input_scale_ub",)


class LayerwiseReload:
    """One layerwise reload: vLLM loads each module separately and copies it into live parameters."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,  # noqa: ANN401 - vLLM's ModelConfig
        device: torch.device,
        rehearses: bool = False,
    ) -> None:
        """`rehearses`: the loader gets placeholders, nothing changes, and `abandon` ends it."""
        self._model, self._config, self._device = model, config, device
        # On a CPU, experts are packed again after the reload, by the kernels that it made.
        self._kernels = None if device.type == "cpu" else KernelState.of_references(model)
        self._volatile = VolatileBuffers(model)
        self._live = dict(model.named_parameters())
        with torch.device(device):
            layerwise().initialize_layerwise_reload(self._model)
        self._account = LoadAccount(model, rehearses=rehearses)
        self._witness: LoadWitness | None = None
        if rehearses:  # no module is ever complete, so that vLLM processes none
            for module in model.modules():
                layerwise().get_layerwise_info(module).load_numel = _NEVER_WHOLE

    def witness(self) -> LayerwiseReload:
        """Fill tensors with a pattern, unless an earlier load is known to have filled them."""
        if self._account.counts:
            filled = self._account.filled_layers()
            self._witness = LoadWitness(
                {name: each for name, each in self._live.items() if name.rpartition(".")[0] in filled}
            )
        return self

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give whole tensors to the loader, which keeps them until their module is complete."""
        with torch.no_grad(), torch.device(self._device):
            self._account.load(weights)

    def require_all(self) -> None:
        """Raise RuntimeError, with names, if the loader left a tensor out."""
        self._account.require_all()

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """As `LoadAccount.dtype_of`."""
        return self._account.dtype_of(tensor)

    def finish(self) -> None:
        """Make the tensors live. Raises RuntimeError, with names, if one of them is not."""
        self.require_all()
        failed = self._finalize()
        self._require_live(failed)
        if self._device.type == "cpu":
            with torch.no_grad(), torch.device(self._device):
                _pack_again(self._model)

    def abandon(self) -> None:
        """Leave the reload, so that the next one starts over. The weights are then a mix."""
        # Without this, the next reload would skip half-loaded modules and continue their counts.
        for module in self._model.modules():
            info = layerwise().get_layerwise_info(module)
            info.load_numel = 0
            info.loaded_weights.clear()
        self._finalize()

    def _finalize(self) -> list[str]:
        """End the reload. Returns the classes of modules for which vLLM says that it loaded nothing."""

        with torch.no_grad(), torch.device(self._device), _failed_to_load() as failed:
            layerwise().finalize_layerwise_reload(self._model, self._config)
        self._volatile.put_back()
        if self._kernels:
            self._kernels.put_back()
        return failed

    def _require_live(self, failed: Iterable[str]) -> None:
        """Raise RuntimeError if vLLM, the modules or the witness contradict the account."""
        now = dict(self._model.named_parameters())
        reasons = dict.fromkeys(self._witness.left(now) if self._witness else (), "not written")
        reasons |= {name: "replaced" for name, each in self._live.items() if now.get(name) is not each}
        reasons |= dict.fromkeys(self._account.contradicted(failed), "not loaded, says vLLM")
        if reasons:
            self._account.forget()
            some = ", ".join(f"{name} ({reason})" for name, reason in [*reasons.items()][:3])
            raise RuntimeError(f"vLLM's loader left out {some}: {len(reasons)} tensors are not live")


def rehearse(
    model: torch.nn.Module,
    config: Any,  # noqa: ANN401 - vLLM's ModelConfig
    device: torch.device,
    tensors: Sequence[TensorMeta],
) -> tuple[TensorMeta, ...]:
    """Run the loader on placeholders of `tensors`, which changes nothing.

    Returns `tensors` in the dtypes in which the loader stores them, such as float32 for the inputs of a state
    space.

    Raises ConfigError, with names, if the loader fails, leaves a tensor out, or makes a parameter.
    """
    shapes = {meta.name: meta.shape for meta in tensors}
    wholes = [torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta") for meta in tensors]
    placeholders = [
        each
        for meta, whole in zip(tensors, wholes, strict=True)
        for each in as_loaded(meta.name, whole, shapes)
    ]
    reload = LayerwiseReload(model, config, device, rehearses=True)
    had = dict(model.named_parameters())
    try:
        reload.load(placeholders)
        reload.require_all()
    except Exception as error:
        if not any(text in str(error) for text in ("meta tensor", "meta device", "Meta")):
            remedy = (
                f"its loader does not take the checkpoint that trainers send: {error or type(error).__name__}"
            )
            raise ConfigError("model", type(model).__name__, remedy) from error
        # Torch says that placeholders have no values: the first load is counted all the same.
    finally:
        dtypes = [str(reload.dtype_of(whole)).removeprefix("torch.") for whole in wholes]
        made = [name for name, _ in model.named_parameters() if name not in had]
        reload.abandon()
    if made:
        remedy = (
            f"vLLM makes {made[0]} anew in each load, so updates cannot write it: serve it with kind torch"
        )
        raise ConfigError("model", type(model).__name__, remedy)
    return tuple(
        dataclasses.replace(meta, dtype=dtype) if {dtype, meta.dtype} <= CASTABLE else meta
        for dtype, meta in zip(dtypes, tensors, strict=True)
    )


_Came = tuple[str, torch.Size, torch.dtype]
"""Name, shape and dtype of a checkpoint's tensor that a loader got."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """A load that filled a model completely.

    Attributes:
        came: the tensors that did.
        writes_directly: whether the model's loader writes parameters without their ``weight_loader``. Then
            each load is counted. Otherwise a load of the same tensors is not counted again.
        partly: how many elements vLLM has counted of each module that has more, by the module's path.
    """

    came: frozenset[_Came]
    writes_directly: bool
    partly: dict[str, int]


_WHOLE: WeakKeyDictionary[torch.nn.Module, _Whole] = WeakKeyDictionary()


class LoadAccount:
    """Calls a model's ``load_weights``, and counts the elements filled since the reload began."""

    def __init__(
        self,
        model: torch.nn.Module,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None,
        rehearses: bool = False,
    ) -> None:
        """Start counting in a running reload. `load` defaults to the model's ``load_weights``."""
        self._model, self._rehearses = model, rehearses
        self._load: Callable[..., object] = load or model.load_weights  # type: ignore[assignment]
        if rehearses:
            self.forget()
        self._expected = _WHOLE.get(model)
        self._to_fill = _to_fill(model)
        self._homes = dict(model.named_modules())  # with LoRA's layers, which the loader does not see
        self._count = None
        if self._expected is None or self._expected.writes_directly:
            live = (*model.parameters(), *model.buffers()) if rehearses else ()
            unwritten = {storage_number(each) for each in live if not each.is_meta}
            self._count = FillCount(self._to_fill, self._is_kept, self._memory_of, unwritten)
        self._came: set[_Came] = set()
        self._made: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}

    @property
    def counts(self) -> bool:
        """Return True if these may be the first tensors that fill the model."""
        return self._expected is None

    def forget(self) -> None:
        """Count the next load, whatever comes."""
        _WHOLE.pop(self._model, None)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give tensors to the loader, by a checkpoint's names."""
        named = list(weights)
        self._came.update((name, tensor.shape, tensor.dtype) for name, tensor in named)
        with self._count or contextlib.nullcontext(), unwrapped(self._model):
            self._load(named)
        if self._count:
            self._process(self._count.take_direct())

    def require_all(self) -> None:
        """Raise RuntimeError, with names, if a tensor that the loader fills is not full.

        If other tensors came than those that filled the model before, the next update counts again.
        """
        missing = self.missing()
        if missing:
            self.forget()
            some = ", ".join(missing[:3])
            raise RuntimeError(f"vLLM's loader left out {some}: {len(missing)} tensors are not whole")
        if self._rehearses:
            return
        writes_directly = self._count is not None and self._count.writes_directly
        self._left = _partly(self._homes)
        _WHOLE[self._model] = _Whole(frozenset(self._came), writes_directly, self._left)

    def missing(self) -> list[str]:
        """Return the names of tensors that are not full."""
        if self._count:
            return self._count.missing(name for name, _, _ in self._came)
        assert self._expected
        expected = self._expected.came
        missing = [f"{name} {tuple(shape)}" for name, shape, _ in sorted(expected - self._came, key=str)]
        if self._came - expected:
            missing.append("what was given other names, shapes or dtypes than before")
        before, now = self._expected.partly, _partly(self._homes)
        parts = (path for path in sorted(before | now) if before.get(path) != now.get(path))
        return missing or [f"a part of {path}" for path in parts]

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which the loader stores `tensor`, while writes are counted."""
        return self._count.dtype_of(tensor) if self._count else tensor.dtype

    def filled_layers(self) -> set[str]:
        """Return the paths of modules all of whose parameters come from the checkpoint, without padding."""
        partly = {_split(name)[0] for name, each in self._to_fill.items() if each.numel < each.tensor.numel()}
        return {_split(name)[0] for name in self._to_fill} - partly

    def contradicted(self, failed: Iterable[str]) -> list[str]:
        """Return the paths of modules that were filled, and of which vLLM says that it loaded nothing.

        Args:
            failed: the names of classes that vLLM gives.
        """
        needed = {_split(name)[0] for name, each in self._to_fill.items() if each.needed}
        kinds = {path: type(self._homes[path]).__name__ for path in needed}
        without = Counter(type(each).__name__ for each in self._homes.values()) - Counter(kinds.values())
        wrong = Counter(failed) - without
        named = sorted(path for path, kind in kinds.items() if wrong[kind])
        return [path for path in named if self._left.get(path) == 0] or named

    def _is_kept(self, name: str) -> bool:
        """Return True if vLLM keeps the write that is made to a meta tensor, to make it in memory later."""
        module, leaf = _home(self._homes, name)
        kept = layerwise().get_layerwise_info(module).loaded_weights
        # It keeps a call of a parameter's loader, and makes the call on the meta tensor to count elements.
        return bool(kept) and kept[-1][0] == leaf and _is_running(layerwise().get_numel_loaded)

    def _memory_of(self, name: str) -> torch.Tensor | None:
        """Return memory that becomes live with the other tensors of the module. None if it is too late."""
        (module, leaf), tensor = _home(self._homes, name), self._to_fill[name].tensor
        info = layerwise().get_layerwise_info(module)
        if not info.can_load():
            return None
        if self._rehearses:
            return tensor
        if leaf in module._non_persistent_buffers_set and info.kernel_tensors:
            live: torch.Tensor | None = info.kernel_tensors[1].get(leaf)
            return live  # it is put back, and vLLM copies nothing into it
        if getattr(module, leaf, None) is tensor:
            self._made[name] = materialized(tensor, info.restore_device)
            setattr(module, leaf, self._made[name])
        return self._made.get(name)

    def _process(self, direct: Mapping[str, int]) -> None:
        """Have vLLM count direct writes, and make modules live that are now complete."""
        modules = {name: _home(self._homes, name)[0] for name in direct if name in self._made}
        for name, module in modules.items():
            layerwise().get_layerwise_info(module).load_numel += direct[name]
        for module in modules.values():
            info = layerwise().get_layerwise_info(module)
            if info.can_load() and info.load_numel >= info.load_numel_total:
                layerwise()._layerwise_process(module, info)


def _partly(homes: Mapping[str, torch.nn.Module]) -> dict[str, int]:
    """Return how many elements vLLM has counted of each module that it has not made live yet."""
    found = ((path, layerwise().get_layerwise_info(each)) for path, each in homes.items())
    return {path: info.load_numel for path, info in found if info.load_numel_total}


def _home(homes: Mapping[str, torch.nn.Module], name: str) -> tuple[torch.nn.Module, str]:
    """Return the module that has a tensor, and the tensor's name in it."""
    path, leaf = _split(name)
    return homes[path], leaf


def _split(name: str) -> tuple[str, str]:
    path, _, leaf = name.rpartition(".")
    return path, leaf


def _is_running(function: Callable[..., object]) -> bool:
    """Return True if this call was made by `function`."""
    frame: FrameType | None = sys._getframe()
    code = function.__code__
    while frame and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _to_fill(model: torch.nn.Module) -> dict[str, ToFill]:
    """Return the tensors that a checkpoint has to fill in a running reload, by name.

    During a reload, a module has the parameters that its loader knows, even if it serves others (quantized,
    packed). Parameters that a checkpoint need not have are left out: second names of tied parameters, scales
    of caches, which have defaults, and those computed by online quantization.
    """
    wanted: dict[str, ToFill] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        if hasattr(module, "kv_cache_dtype"):
            continue
        served, _ = layerwise().get_layerwise_info(module).kernel_tensors or (module._parameters, {})
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        for name, parameter in parameters.items():
            first = id(served.get(name, parameter))
            if first not in known and not _is_computed(module, name):
                wanted[_join(path, name)] = ToFill(parameter, _load_numel(parameter))
            known.add(first)
        for name, buffer in module._buffers.items():
            # In modules with parameters, vLLM replaces buffers that it reloads; others keep their values.
            if buffer is not None and buffer.is_meta:
                needed = bool(parameters) and name not in module._non_persistent_buffers_set
                wanted[_join(path, name)] = ToFill(buffer, _load_numel(buffer), needed)
    return wanted


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _load_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements without padding that vLLM declares."""
    numel: int = getattr(tensor, "weight_loader_numel", tensor.numel())
    return numel


def _is_computed(module: torch.nn.Module, name: str) -> bool:
    if name in _FROM_CONFIG:
        return True
    # Methods that quantize full-precision checkpoints online, by their names in 0.24 to 0.33.
    method = type(getattr(module, "quant_method", None)).__name__
    return name.endswith("_scale") and ("Online" in method or method == "ExpertsInt8MoEMethod")


@contextlib.contextmanager
def _failed_to_load() -> Iterator[list[str]]:
    """Collect the classes of modules for which vLLM warns that it loaded nothing.

    It does so at each update, of modules without weights, too, such as rotary embeddings.
    """
    failed: list[str] = []

    def passes(record: logging.LogRecord) -> bool:
        is_other = record.msg != "%s: Failed to load weights"
        if not is_other and isinstance(record.args, tuple):
            failed.append(str(record.args[0]))
        return is_other

    layerwise().logger.addFilter(passes)
    try:
        yield failed
    finally:
        layerwise().logger.removeFilter(passes)


def _pack_again(model: torch.nn.Module) -> None:
    """Pack weights for the CPU that a reload does not: experts, and a tied head."""
    for module in model.modules():
        if is_lora(module):
            continue  # it has the attributes of the layer that it wraps
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "w13_weight"):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():  # type: ignore[operator]
            method.process_weights_after_loading(module)
