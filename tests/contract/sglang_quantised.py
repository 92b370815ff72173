"""Layers with the names and form of a quantised SGLang, and weights of a trainer for them.

Their loader copies into live parameters at once, as SGLang's does.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import build_tiny_qwen3
from weightsync.engines.sglang.worker import RankSettings, SglangHost
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import named_tensors

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
BLOCK = 32
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["model.layers.1.self_attn.o_proj"],
}
PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Fp8LinearMethod(SimpleNamespace): ...


class Fp8MoEMethod(SimpleNamespace): ...


class Fp8KVCacheMethod(SimpleNamespace): ...


class UnquantizedLinearMethod(SimpleNamespace): ...


def held(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """One matrix, or several of a checkpoint one below the other, in FP8 blocks or in bfloat16."""

    def __init__(self, parts: Mapping[str, tuple[int, int]], quantised: bool) -> None:
        super().__init__()
        self.parts = parts
        rows, columns = sum(each[0] for each in parts.values()), next(iter(parts.values()))[1]
        self.weight = held(rows, columns, dtype=FP8 if quantised else torch.bfloat16)
        self.quant_method: Any = UnquantizedLinearMethod()
        if quantised:
            self.weight_scale_inv = held(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32)
            self.quant_method = Fp8LinearMethod(block_quant=True, use_mxfp8=False, use_marlin=False)

    def load(self, part: str, leaf: str, tensor: torch.Tensor) -> None:
        unit = BLOCK if leaf == "weight_scale_inv" else 1
        before = list(self.parts)[: list(self.parts).index(part)]
        first = sum(self.parts[each][0] // unit for each in before)
        getattr(self, leaf).data.narrow(0, first, tensor.shape[0]).copy_(tensor)


class Experts(nn.Module):
    def __init__(self, number: int, width: int, columns: int) -> None:
        super().__init__()
        self.w13_weight = held(number, 2 * width, columns, dtype=FP8)
        self.w2_weight = held(number, columns, width, dtype=FP8)
        scales = -(-2 * width // BLOCK), -(-columns // BLOCK)
        self.w13_weight_scale_inv = held(number, *scales, dtype=torch.float32)
        self.w2_weight_scale_inv = held(number, scales[1], scales[0] // 2, dtype=torch.float32)
        runner = SimpleNamespace(runner_backend=SimpleNamespace(value="triton"))
        self.quant_method = Fp8MoEMethod(
            block_quant=True, use_mxfp8=False, is_fp4_expert=False, runner=runner
        )

    def load(self, number: int, part: str, leaf: str, tensor: torch.Tensor) -> None:
        target = getattr(self, f"{'w2' if part == 'down_proj' else 'w13'}_{leaf}").data[number]
        first = len(target) // 2 if part == "up_proj" else 0
        target.narrow(0, first, len(tensor)).copy_(tensor)


class Attention(nn.Module):
    """With scales of its cache, which dummy weights draw, and which no checkpoint has to have."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale, self.v_scale = held(), held()
        self.k_scale_float = self.v_scale_float = 1.0
        self.quant_method = Fp8KVCacheMethod()


class Embedding(nn.Module):
    def __init__(self, rows: int, columns: int, padding: int) -> None:
        super().__init__()
        self.rows, self.weight = rows, held(rows + padding, columns)

    def load(self, tensor: torch.Tensor) -> None:
        self.weight.data[: self.rows].copy_(tensor)
        self.weight.data[self.rows :].fill_(0)


class Model(nn.Module):
    """Has the layers that SGLang makes of a Qwen3's config: fused, with all experts of a layer in one."""

    num_loads = 0

    def __init__(
        self, path: Path, ignored: Iterable[str] = BLOCKS["modules_to_not_convert"], padding: int = 3
    ) -> None:
        super().__init__()
        config, shapes = described(path)
        parts: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            layer, _, last = name.removesuffix(".weight").rpartition(".")
            if ".experts." in name:
                self._put(layer, Experts(shape[0], config.moe_intermediate_size, config.hidden_size))
            elif last.endswith("_proj"):
                fused = f"{layer}.{PACKED.get(last, last)}"
                parts.setdefault(fused, {})[last] = shape
            elif "embed_tokens" in name:
                self._put(f"{layer}.{last}", Embedding(*shape, padding))
            else:
                module = nn.Module()
                module.weight = held(*shape)
                self._put(f"{layer}.{last}" if layer else last, module)
        for fused, its in parts.items():
            self._put(fused, Linear(its, quantised=fused not in ignored))
        self._put("model.layers.0.self_attn.attn", Attention())
        with torch.no_grad():
            for number, each in enumerate(self.parameters()):
                each.copy_(torch.full(each.shape, 1e-3 * number).to(each.dtype))

    def _put(self, path: str, module: nn.Module) -> None:
        *parents, last = path.split(".")
        at: nn.Module = self
        for name in parents:
            if not hasattr(at, name):
                at.add_module(name, nn.Module())
            at = getattr(at, name)
        if not hasattr(at, last):
            at.add_module(last, module)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_loads += 1
        modules = dict(self.named_modules())
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            layer, _, last = path.rpartition(".")
            experts, _, number = layer.rpartition(".")
            if isinstance(stack := modules.get(experts), Experts):
                stack.load(int(number), last, leaf, tensor)
                continue
            found = modules.get(path) or modules[f"{layer}.{PACKED.get(last, last)}"]
            if isinstance(found, Linear):
                found.load(last, leaf, tensor)
            elif isinstance(found, Embedding):
                found.load(tensor)
            else:
                getattr(found, leaf).data.copy_(tensor)


@functools.cache
def _config(moe: bool) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_qwen3(Path(folder), moe)
        config: Mapping[str, Any] = json.loads(Path(folder, "config.json").read_text())
        return config


def saved(folder: Path, quantization: Mapping[str, Any] = BLOCKS, moe: bool = False) -> Path:
    """A folder with a config alone, as an engine starts from."""
    config = {**_config(moe), "quantization_config": quantization, "dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_described: dict[str, tuple[Any, Mapping[str, tuple[int, ...]]]] = {}


def described(folder: Path) -> tuple[Any, Mapping[str, tuple[int, ...]]]:
    """Return a folder's config, and the shapes of the model's tensors by name. Do not change them."""
    text = (folder / "config.json").read_text()
    if text not in _described:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(each.shape) for name, each in named_tensors(whole)[0].items()}
        _described[text] = config, shapes
    return _described[text]


def host_of(model: nn.Module, folder: Path, **settings: Any) -> SglangHost:
    return SglangHost(model, CPU, RankSettings("e0", str(folder), "bfloat16", **settings))


def trained(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights of a trainer, in bfloat16, experts one by one."""
    draw = torch.Generator().manual_seed(seed)
    _, shapes = described(folder)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {
        name: part.to(torch.bfloat16)
        for whole_name, each in tensors.items()
        for name, part in as_loaded(whole_name, each, shapes)
    }


OUT, EXPERTS = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts"


def runner(name: str) -> SimpleNamespace:
    return SimpleNamespace(runner_backend=SimpleNamespace(value=name))


def weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Of a trainer. Up projections are greater than gates, one expert is zero, and one has other sizes."""
    tensors = trained(folder, seed)
    for name, each in tensors.items():
        if ".experts." in name:
            each *= 5 if ".up_proj" in name else 1
            each *= {0: 0.0, 1: 1e-4}.get(int(name.split(".experts.")[1].split(".")[0]), 1.0)
    return tensors
