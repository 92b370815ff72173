"""Layers with the names and form of a vLLM that quantises to FP8 as it loads, and its method in plain torch.

vLLM's own layerwise loading and reload run on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from tests.contract.sglang_online import Quantise, whole
from tests.contract.sglang_quantised import PACKED, described
from weightsync.engines.quantised.online_places import STACKS
from weightsync.engines.vllm.worker import VllmHost

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
OUT = "model.layers.0.self_attn.o_proj"
QKV = "model.layers.0.self_attn.qkv_proj"
IGNORED = "model.layers.1.self_attn.o_proj"
DONE = "_already_called_process_weights_after_loading"
"""What vLLM's methods give a layer that they have processed."""
BY_COLUMNS = ("o_proj", "down_proj")


def otherwise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a quotient that is rounded once, which no kernel of vLLM's has for a whole matrix."""
    scale = weight.float().abs().max() / torch.tensor(448.0)
    return (weight.float() / scale).to(FP8), scale.reshape(1)


class Method:
    """A method of vLLM's, which is imported on use."""

    requires_device_loading, uses_meta_device = True, False


class Fp8PerTensorOnlineLinearMethod(Method):
    """As vLLM's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, quantise: Quantise = whole) -> None:
        self.quantise, self.num_processed = quantise, [0]
        self.fp8_linear, self.fill = SimpleNamespace(num_rows=0), 0

    def create_weights(self, layer: Any, rows: int, columns: int, **attributes: Any) -> None:
        weight = nn.Parameter(
            torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), requires_grad=False
        )
        vars(weight).update(attributes)
        layer.register_parameter("weight", weight)
        begin_quantising(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        self.num_processed[0] += 1
        layer.input_scale = None
        values, scale = self.quantise(layer.weight)
        behind = -len(values) % 16  # vLLM's CUTLASS kernels want multiples of 16
        values = nn.functional.pad(values.view(torch.uint8), (0, 0, 0, behind), value=self.fill).view(FP8)
        replace_parameter(layer, "weight", values.t().data)
        replace_parameter(layer, "weight_scale", scale.data)
        self.fp8_linear.num_rows = layer.weight.shape[1]
        setattr(layer, DONE, True)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class Fp8OnlineMoEMethod(Method):
    """As vLLM's of 0.24 for experts. `num_parts`: the ranks that have a part of each."""

    def __init__(self, quantise: Quantise = whole, num_parts: int = 1) -> None:
        self.quantise, self.num_processed = quantise, [0]
        self.moe = SimpleNamespace(tp_size=num_parts)
        self.moe_kernel: Any = None

    def create_weights(
        self,
        layer: Any,
        number: int,
        width: int,
        columns: int,
        **attributes: Any,
    ) -> None:
        layer.num_experts = layer.local_num_experts = number
        shapes = ((number, 2 * width, columns), (number, columns, width))
        for leaf, shape in zip(STACKS, shapes, strict=True):
            stack = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
            vars(stack).update(attributes)
            layer.register_parameter(leaf, stack)
        begin_quantising(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        self.num_processed[0] += 1
        for leaf in STACKS:
            stack, scales = getattr(layer, leaf), torch.ones(layer.num_experts)
            values = torch.empty_like(stack, dtype=FP8)
            for number in range(layer.local_num_experts):
                values[number], scales[number] = self.quantise(stack[number])
            replace_parameter(layer, leaf, values)
            replace_parameter(layer, f"{leaf}_scale", scales)
        if config := self.get_fused_moe_quant_config(layer):
            packs = SimpleNamespace(process_weights_after_loading=lambda layer: None)
            self.moe_kernel = SimpleNamespace(config=config, fused_experts=packs)
        setattr(layer, DONE, True)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return SimpleNamespace(w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class UnquantizedLinearMethod: ...


def begin_quantising(layer: Any) -> None:
    """Have vLLM quantise a layer when all its weights have come."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    QuantizeMethodBase.register(Method)
    initialize_online_processing(layer)


def replace_parameter(layer: Any, name: str, data: torch.Tensor) -> None:
    from vllm.model_executor import utils

    utils.replace_parameter(layer, name, data)


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
        if isinstance(method, Method):
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


class RoutedExperts(nn.Module):
    """A rank's part of all experts, or all of some experts. `share`: which of how many ranks' it has."""

    def __init__(
        self,
        stack: tuple[int, int, int],
        method: Fp8OnlineMoEMethod,
        part: tuple[int, int],
        share: tuple[int, int],
    ) -> None:
        super().__init__()
        number, rows, columns = stack
        (self.part, num_parts), (at, num_shares) = part, share
        number //= num_shares
        self.first, self.quant_method = at * number, method
        if num_shares > 1:  # vLLM 0.24 has it as a persistent buffer
            experts = torch.arange(number * num_shares, dtype=torch.int32) - self.first
            self.register_buffer("_expert_map", experts.where((experts >= 0) & (experts < number), -1))
        method.create_weights(self, number, rows // 2 // num_parts, columns, weight_loader=self.weight_loader)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str, expert_id: int
    ) -> None:
        if not 0 <= expert_id - self.first < len(param):
            return  # another rank's
        target, axis = param.data[expert_id - self.first], 1 if shard_id == "down_proj" else 0
        if axis == 0:
            target = target.chunk(2)[shard_id == "up_proj"]
        size = target.shape[axis]
        target.copy_(loaded_weight.narrow(axis, self.part * size, size))


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
    """Has the layers that vLLM makes of a Qwen3, one of which it leaves as it is. `start` loads them.

    `whole_experts`: a rank has some of the experts, and not a part of each.
    """

    def __init__(
        self,
        folder: Path,
        quantise: Quantise = whole,
        rank: int = 0,
        num_ranks: int = 1,
        copies: int = 1,
        whole_experts: bool = False,
    ) -> None:
        super().__init__()
        from vllm.model_executor.model_loader import reload

        _, shapes = described(folder)
        parts: dict[str, dict[str, Any]] = {}
        self.method = Fp8PerTensorOnlineLinearMethod(quantise)
        cuts = (rank, num_ranks), (0, 1)
        part, share = reversed(cuts) if whole_experts else cuts
        self.of_experts = Fp8OnlineMoEMethod(quantise, part[1])
        for name, shape in shapes.items():
            layer, _, last = name.removesuffix(".weight").rpartition(".")
            if name.endswith(".experts.gate_up_proj"):
                self._put(f"{layer}.routed_experts", RoutedExperts(shape, self.of_experts, part, share))
            elif ".experts." in name:
                continue
            elif last == "gate":
                router = Linear({last: shape}, self.method, 0, 1, 1)  # type: ignore[dict-item]
                self._put(f"{layer}.{last}", router)
            elif last.endswith("_proj"):
                parts.setdefault(f"{layer}.{PACKED.get(last, last)}", {})[last] = shape
            elif last == "embed_tokens":
                self._put(f"{layer}.{last}", Embedding(*shape))
            else:
                module = nn.Module()
                module.weight = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16), requires_grad=False)
                self._put(f"{layer}.{last}", module)
        for path, its in parts.items():
            method = UnquantizedLinearMethod() if path == IGNORED else self.method
            self._put(path, Linear(its, method, rank, num_ranks, copies))
        reload.record_metadata_for_reloading(self)

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
            if ".experts." in name:
                taken.add(self._load_expert(modules, *layer.split(".experts."), last, tensor))
                continue
            holder = path if path in modules else f"{layer}.{PACKED[last]}"
            param: Any = modules[holder].weight
            shard = [last] if isinstance(modules[holder], Linear) else []
            getattr(param, "weight_loader", lambda param, tensor: param.data.copy_(tensor))(
                param, tensor, *shard
            )
            taken.add(f"{holder}.weight")
        return taken

    def _load_expert(
        self, modules: Mapping[str, nn.Module], layer: str, number: str, projection: str, tensor: torch.Tensor
    ) -> str:
        holder, leaf = f"{layer}.experts.routed_experts", STACKS[projection == "down_proj"]
        stack: Any = modules[holder].get_parameter(leaf)
        stack.weight_loader(stack, tensor, shard_id=projection, expert_id=int(number))
        return f"{holder}.{leaf}"

    def start(self, tensors: Mapping[str, torch.Tensor]) -> Online:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

        with torch.no_grad():
            self.load_weights(tensors.items())
            finalize_layerwise_processing(self, SimpleNamespace(dtype=torch.bfloat16))  # type: ignore[arg-type]
        return self

    @property
    def num_processed(self) -> int:
        """How many layers vLLM's methods have quantised."""
        return self.method.num_processed[0] + self.of_experts.num_processed[0]


def host_of(model: nn.Module, folder: Path, enable_eplb: bool = False, **more: object) -> VllmHost:
    config = AutoConfig.from_pretrained(folder)
    model_config = SimpleNamespace(
        hf_config=config,
        dtype=torch.bfloat16,
        quantization="fp8",
        model=str(folder),
        hf_config_path=None,
        hf_overrides={},
        revision=None,
        trust_remote_code=False,
    )
    parallel = SimpleNamespace(
        **{"enable_eplb": enable_eplb, "eplb_config": SimpleNamespace(use_async=False), **more}
    )
    vllm_config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model_config,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    runner: Any = SimpleNamespace(vllm_config=vllm_config, model_config=model_config, get_model=lambda: model)
    return VllmHost(runner, CPU)


def linears(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "weight_scale")]


def quantised(model: nn.Module) -> list[Any]:
    """Return the linear layers and the experts that vLLM has quantised."""
    return [*linears(model), *(each for each in model.modules() if isinstance(each, RoutedExperts))]
