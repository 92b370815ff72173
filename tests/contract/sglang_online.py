"""Layers with the names and form of an SGLang that quantises to FP8 when it starts.

Its quantisers are stated in plain torch, as its machine code for Hopper GPUs has them. Only the reciprocal
differs, which is approximate there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.contract.sglang_quantised import FP8, PACKED, Experts, Linear, Model, runner, trained

OUT = "model.layers.0.self_attn.o_proj"
IGNORED = "model.layers.1.self_attn.o_proj"
BY_COLUMNS = ("o_proj", "down_proj")


def by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's values, and a float32 scale for each row, of finite weights."""
    scales = weight.float().abs().amax(1, keepdim=True) * torch.tensor(1 / 448, dtype=torch.float32)
    inverses = torch.where(scales == 0, torch.zeros(1), scales.reciprocal())
    return (weight.float() * inverses).clamp(-448, 448).to(FP8), scales


class Fp8LinearMethod(SimpleNamespace):
    """As SGLang's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, **attributes: object) -> None:
        config = SimpleNamespace(is_checkpoint_fp8_serialized=False)
        held = {"block_quant": False, "use_mxfp8": False, "use_marlin": False, "quantize": by_row}
        super().__init__(quant_config=config, **held | attributes)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., object],
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = nn.Parameter(data, requires_grad=False)
        layer.weight.weight_loader = weight_loader  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: Any) -> None:
        values, scales = self.quantize(layer.weight)
        layer.weight = nn.Parameter(values.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scales.t().contiguous(), requires_grad=False)
        layer.input_scale = None


class W8A8Fp8LinearMethod(Fp8LinearMethod):
    """As SGLang's for ``quantization="w8a8_fp8"``: it names its config otherwise, and has an older loader."""

    def __init__(self) -> None:
        super().__init__()
        self.quantization_config = vars(self).pop("quant_config")


class OnlineLinear(Linear):
    """A rank's part of a matrix: of its rows, or for the last layers of a block of its columns."""

    def __init__(self, parts: Mapping[str, tuple[int, int]], method: Any, rank: int, num_ranks: int) -> None:
        self.rank, self.is_by_columns = rank, next(iter(parts)) in BY_COLUMNS
        cut = (1, num_ranks) if self.is_by_columns else (num_ranks, 1)
        super().__init__({name: (n // cut[0], m // cut[1]) for name, (n, m) in parts.items()}, False)
        rows, columns = self.weight.shape
        self.quant_method = method
        load = self.weight_loader if isinstance(method, W8A8Fp8LinearMethod) else self.weight_loader_v2
        method.create_weights(self, columns, [rows], columns, rows, torch.bfloat16, weight_loader=load)

    def load(self, part: str, leaf: str, tensor: torch.Tensor) -> None:
        param: Any = getattr(self, leaf)
        param.weight_loader(param, tensor, part)

    def weight_loader_v2(self, param: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        rows, columns = self.parts[part]
        axis, size = (1, columns) if self.is_by_columns else (0, rows)
        before = list(self.parts)[: list(self.parts).index(part)]
        target = param.data.narrow(0, sum(self.parts[each][0] for each in before), rows)
        target.copy_(tensor.narrow(axis, self.rank * size, size))

    def weight_loader(self, param: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        assert isinstance(self.quant_method, W8A8Fp8LinearMethod), "the other loader is the layer's"
        self.weight_loader_v2(param, tensor, part)


class Online(Model):
    """Has the layers of a Qwen3 that SGLang quantises, one of them ignored. `start` quantises."""

    linear = OnlineLinear

    def __init__(
        self,
        folder: Path,
        method: Callable[[], Any] = Fp8LinearMethod,
        rank: int = 0,
        num_ranks: int = 1,
        padding: int = 3,
    ) -> None:
        fused = {f"{of}.{PACKED.get(last, last)}" for of, _, last in map(split, paths(folder))}
        super().__init__(folder, ignored=fused, padding=padding)
        for path, each in list(self.named_modules()):
            if isinstance(each, Linear) and path != IGNORED:
                parent, _, last = split(path)
                setattr(self.get_submodule(parent), last, self.linear(each.parts, method(), rank, num_ranks))
        draw = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=draw).to(each.dtype))

    def start(self) -> Online:
        for module in self.modules():
            if isinstance(module, OnlineLinear):
                module.quant_method.process_weights_after_loading(module)
        return self


def split(path: str) -> tuple[str, str, str]:
    return path.rpartition(".")


def paths(folder: Path) -> Iterable[str]:
    return [name.removesuffix(".weight") for name in trained(folder, 0) if name.endswith("_proj.weight")]


Change = Callable[[Any], object]


def method(path: str, **attributes: object) -> Change:
    """Have the method of a layer be otherwise."""
    return lambda model: vars(model.get_submodule(path).quant_method).update(attributes)


def layer(path: str, **attributes: object) -> Change:
    """Have a layer, or its parameter, be otherwise."""
    is_parameter = path.rpartition(".")[2].startswith("weight")
    return lambda model: vars(
        model.get_parameter(path) if is_parameter else model.get_submodule(path)
    ).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor], path: str = OUT) -> Change:
    """Have a parameter of a layer be otherwise."""

    def change(model: Any) -> None:
        layer = model.get_submodule(path)
        setattr(layer, name, nn.Parameter(data(getattr(layer, name).data), requires_grad=False))

    return change


def doubled(model: Any) -> None:
    load = model.load_weights
    model.load_weights = lambda weights: load((name, tensor * 2) for name, tensor in weights)


Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's values, and one float32 scale, of finite weights. Zeros times infinity are 448."""
    scale = weight.float().abs().max() / torch.tensor(448.0)
    return (weight.float() * (1 / scale)).nan_to_num(448).clamp(-448, 448).to(FP8), scale.reshape(1)


class Fp8MoEMethod(SimpleNamespace):
    """As SGLang's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, quantise: Quantise = whole) -> None:
        config = SimpleNamespace(is_checkpoint_fp8_serialized=False)
        held = {"block_quant": False, "use_mxfp8": False, "quantise": quantise, "runner": runner("triton")}
        super().__init__(quant_config=config, **held)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        assert not with_bias
        assert layer.num_local_experts  # SGLang's methods read attributes of the layer itself
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            vars(weight).update(attributes)
            layer.register_parameter(name, weight)
        layer.w13_weight_scale = nn.Parameter(torch.ones(num_experts, 2), requires_grad=False)
        layer.w2_weight_scale = nn.Parameter(torch.ones(num_experts), requires_grad=False)
        layer.w13_input_scale = layer.w2_input_scale = None

    def process_weights_after_loading(self, layer: Any) -> None:
        made = {
            name: torch.empty_like(getattr(layer, name), dtype=FP8) for name in ("w13_weight", "w2_weight")
        }
        layer.w13_weight_scale = nn.Parameter(torch.ones(layer.num_local_experts), requires_grad=False)
        for number in range(layer.num_local_experts):
            for name, values in made.items():
                scales = getattr(layer, f"{name}_scale")
                values[number], scales[number] = self.quantise(getattr(layer, name).data[number])
        for name, values in made.items():
            setattr(layer, name, nn.Parameter(values, requires_grad=False))


class FusedMoE(Experts):
    """A rank's part of all experts, or all of some experts."""

    def __init__(self, of: Experts, method: Any, part: tuple[int, int], share: tuple[int, int]) -> None:
        nn.Module.__init__(self)
        number, columns, width = of.w2_weight.shape
        (self.part, num_parts), (first, num_shares) = part, share
        self.num_local_experts = number // num_shares
        self.first, self.quant_method = first * self.num_local_experts, method
        method.create_weights(
            layer=self,
            num_experts=self.num_local_experts,
            hidden_size=columns,
            intermediate_size_per_partition=width // num_parts,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
        )

    def load(self, number: int, part: str, leaf: str, tensor: torch.Tensor) -> None:
        shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
        param: Any = self.w2_weight if shard == "w2" else self.w13_weight
        param.weight_loader(param, tensor, f"{leaf} of {part}", shard_id=shard, expert_id=number)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        if not 0 <= expert_id - self.first < self.num_local_experts:
            return  # another rank's
        target = param.data[expert_id - self.first]
        if shard_id == "w2":
            size = target.shape[1]
            target.copy_(loaded_weight.narrow(1, self.part * size, size))
        else:
            size = target.shape[0] // 2
            part = loaded_weight.narrow(0, self.part * size, size)
            target.narrow(0, size if shard_id == "w3" else 0, size).copy_(part)


class OnlineMoe(Online):
    """Has the layers of a mixture of experts, of which SGLang quantises the linear ones, too."""

    def __init__(
        self,
        folder: Path,
        method: Callable[[], Any] = Fp8MoEMethod,
        part: tuple[int, int] = (0, 1),
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(folder, Fp8LinearMethod, *part)
        for path, each in list(self.named_modules()):
            if isinstance(each, Experts):
                parent, _, last = path.rpartition(".")
                setattr(self.get_submodule(parent), last, FusedMoE(each, method(), part, share))
        draw = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw).to(parameter.dtype))

    def start(self) -> OnlineMoe:
        super().start()
        for each in self.modules():
            if isinstance(each, FusedMoE):
                each.quant_method.process_weights_after_loading(each)
        return self
