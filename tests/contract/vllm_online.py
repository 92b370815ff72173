"""Layers with the names and form of a vLLM that quantises to FP8 as it loads, and its method in plain torch.

vLLM's own layerwise loading and reload run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    initialize_online_processing,
)
from vllm.model_executor.utils import replace_parameter

from tests.contract.test_sglang_quantized import PACKED
from tests.quantised import same_bits
from weightsync.engines.live_digest import parameters_of
from weightsync.engines.vllm.worker import VllmHost
from weightsync.engines.whole_sink import Loader
from weightsync.memory.tensors import named_tensors

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
OUT = "model.layers.0.self_attn.o_proj"
QKV = "model.layers.0.self_attn.qkv_proj"
IGNORED = "model.layers.1.self_attn.o_proj"
DONE = "_already_called_process_weights_after_loading"
"""What vLLM's methods give a layer that they have processed."""
BY_COLUMNS = ("o_proj", "down_proj")
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's values, and one float32 scale, of finite weights. Zeros times infinity are 448."""
    scale = weight.float().abs().max() / torch.tensor(448.0)
    return (weight.float() * (1 / scale)).nan_to_num(448).clamp(-448, 448).to(FP8), scale.reshape(1)


def otherwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a quotient that is rounded once, which no kernel of vLLM's has for a whole matrix."""
    scale = weight.float().abs().max() / torch.tensor(448.0)
    return (weight.float() / scale).to(FP8), scale.reshape(1)


class Fp8PerTensorOnlineLinearMethod(QuantizeMethodBase):
    """As vLLM's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, quantise: Quantise = whole) -> None:
        self.quantise, self.num_processed = quantise, [0]
        self.fp8_linear = SimpleNamespace(num_rows=0)

    def create_weights(self, layer: Any, rows: int, columns: int, **attributes: Any) -> None:
        weight = nn.Parameter(
            torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), requires_grad=False
        )
        vars(weight).update(attributes)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        self.num_processed[0] += 1
        layer.input_scale = None
        values, scale = self.quantise(layer.weight)
        replace_parameter(layer, "weight", values.t().data)
        replace_parameter(layer, "weight_scale", scale.data)
        self.fp8_linear.num_rows = layer.weight.shape[1]
        setattr(layer, DONE, True)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class UnquantizedLinearMethod: ...


class Linear(nn.Module):
    """A rank's part of a matrix, or of several: of their rows, or of the columns of `BY_COLUMNS`.

    Where a rank has no whole head of keys of its own, several keep the same ones.
    """

    def __init__(
        self, parts: Mapping[str, tuple[int, int]], method: Any, rank: int, num_ranks: int, copies: int
    ) -> None:
        super().__init__()
        self.is_by_columns = next(iter(parts)) in BY_COLUMNS
        self.tp_size, self.quant_method = num_ranks, method
        self.cuts = {
            name: (rank // copies, num_ranks // copies) if name in ("k_proj", "v_proj") else (rank, num_ranks)
            for name in parts
        }
        self.shapes = {name: self._part(name, shape) for name, shape in parts.items()}
        rows, columns = sum(each[0] for each in self.shapes.values()), next(iter(self.shapes.values()))[1]
        if isinstance(method, QuantizeMethodBase):
            method.create_weights(self, rows, columns, weight_loader=self.weight_loader)  # type: ignore[arg-type]
        else:
            self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16), requires_grad=False)
            vars(self.weight).update(weight_loader=self.weight_loader)

    def _part(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        _, count = self.cuts[name]
        rows, columns = shape
        return (rows, columns // count) if self.is_by_columns else (rows // count, columns)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str) -> None:
        axis = 1 if self.is_by_columns else 0
        size, number = self.shapes[shard_id][axis], self.cuts[shard_id][0]
        names = list(self.shapes)
        first = sum(self.shapes[each][0] for each in names[: names.index(shard_id)])
        target = param.data.narrow(0, first, self.shapes[shard_id][0])
        target.copy_(loaded_weight.narrow(axis, number * size, size))


class Embedding(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(rows + 3, columns, dtype=torch.bfloat16), requires_grad=False)
        vars(self.weight).update(weight_loader=self.weight_loader)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data[: self.rows].copy_(loaded_weight)
        param.data[self.rows :].fill_(0)


class Online(nn.Module):
    """Has the layers that vLLM makes of a Qwen3, one of which it leaves as it is. `start` loads them."""

    def __init__(
        self, folder: Path, quantise: Quantise = whole, rank: int = 0, num_ranks: int = 1, copies: int = 1
    ) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            named = named_tensors(AutoModelForCausalLM.from_config(config))[0]
        parts: dict[str, dict[str, Any]] = {}
        self.method = Fp8PerTensorOnlineLinearMethod(quantise)
        for name, each in named.items():
            layer, _, last = name.removesuffix(".weight").rpartition(".")
            if last.endswith("_proj"):
                parts.setdefault(f"{layer}.{PACKED.get(last, last)}", {})[last] = tuple(each.shape)
            elif last == "embed_tokens":
                self._put(f"{layer}.{last}", Embedding(*each.shape))
            else:
                module = nn.Module()
                module.weight = nn.Parameter(
                    torch.ones(each.shape, dtype=torch.bfloat16), requires_grad=False
                )
                self._put(f"{layer}.{last}", module)
        for path, its in parts.items():
            method = UnquantizedLinearMethod() if path == IGNORED else self.method
            self._put(path, Linear(its, method, rank, num_ranks, copies))
        record_metadata_for_reloading(self)

    def _put(self, path: str, module: nn.Module) -> None:
        *parents, last = path.strip(".").split(".")
        at: nn.Module = self
        for name in parents:
            if not hasattr(at, name):
                at.add_module(name, nn.Module())
            at = getattr(at, name)
        at.add_module(last, module)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        modules, taken = dict(self.named_modules()), set()
        for name, tensor in weights:
            path = name.removesuffix(".weight")
            layer, _, last = path.rpartition(".")
            holder = path if path in modules else f"{layer}.{PACKED[last]}"
            param: Any = modules[holder].weight
            shard = [last] if isinstance(modules[holder], Linear) else []
            getattr(param, "weight_loader", lambda param, tensor: param.data.copy_(tensor))(
                param, tensor, *shard
            )
            taken.add(f"{holder}.weight")
        return taken

    def start(self, tensors: Mapping[str, torch.Tensor]) -> Online:
        with torch.no_grad():
            self.load_weights(tensors.items())
            finalize_layerwise_processing(self, SimpleNamespace(dtype=torch.bfloat16))  # type: ignore[arg-type]
        return self

    @property
    def num_processed(self) -> int:
        """How many layers vLLM's method has quantised."""
        return self.method.num_processed[0]


def host_of(model: nn.Module, folder: Path, num_stages: int = 1) -> VllmHost:
    config = AutoConfig.from_pretrained(folder)
    model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16, quantization="fp8")
    parallel = SimpleNamespace(pipeline_parallel_size=num_stages, enable_eplb=False)
    vllm_config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model_config,
        load_config=SimpleNamespace(load_format="auto"),
    )
    runner: Any = SimpleNamespace(vllm_config=vllm_config, model_config=model_config, get_model=lambda: model)
    return VllmHost(runner, CPU)


def load(loader: Loader, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        loader.load(iter(tensors.items()))
        loader.finish()


def differing(model: nn.Module, wanted: nn.Module) -> list[str]:
    live = dict(parameters_of(wanted))
    found = dict(parameters_of(model))
    assert list(found) == list(live)
    return [name for name, each in found.items() if not same_bits(each, live[name])]


def linears(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "weight_scale")]
