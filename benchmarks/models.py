"""Which tensors the benchmarks move, and which slice of each an engine rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recipes.catalog import load
from recipes.shapes import ModelShape, checkpoint_tensors
from weightsync.plan import Box

__all__ = ["Tensor", "llama_like", "model_of", "rank_box"]

_TINY = ModelShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    qk_norm=True,
)
_CUTS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0)
_CUTS |= dict.fromkeys(("o_proj", "down_proj"), 1)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One bfloat16 tensor of a checkpoint; `cut` is the dimension that tensor parallelism cuts, if any."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def model_of(name: str, gib: float, num_layers: int | None = None) -> tuple[Tensor, ...]:
    """A model by its name on the command line.

    ``8b`` (Qwen3-8B), ``llama`` (layers of one shape, `gib` GiB of them), ``moe`` and ``moe-stacked``
    (Qwen3-30B-A3B, experts one by one or stacked), ``tiny`` (what is left when there are no bytes).
    """
    if name == "llama":
        return llama_like(gib)
    if name == "tiny":
        return _tensors(_TINY)
    shipped = {"8b": "qwen3-8b", "moe": "qwen3-30b-a3b", "moe-stacked": "qwen3-30b-a3b"}[name]
    shape = load(ModelShape, shipped, field="model", kind="models")
    tensors = _tensors(replace(shape, num_hidden_layers=num_layers or shape.num_hidden_layers))
    return _stacked(tensors, shape) if name == "moe-stacked" else tensors


def llama_like(gib: float, hidden: int = 5120) -> tuple[Tensor, ...]:
    """About `gib` GiB of equal layers with a fused qkv."""
    layer = (
        Tensor("qkv", (3 * hidden, hidden), 0),
        Tensor("o", (hidden, hidden), 1),
        Tensor("gate", (3 * hidden, hidden), 0),
        Tensor("up", (3 * hidden, hidden), 0),
        Tensor("down", (hidden, 3 * hidden), 1),
        Tensor("norm", (hidden,)),
    )
    num_layers = max(1, round(gib * 2**30 / sum(tensor.nbytes for tensor in layer)))
    return tuple(
        Tensor(f"model.layers.{i}.{each.name}.weight", each.shape, each.cut)
        for i in range(num_layers)
        for each in layer
    )


def _tensors(shape: ModelShape) -> tuple[Tensor, ...]:
    metas = checkpoint_tensors(shape)
    assert {meta.dtype for meta in metas} == {"bfloat16"}
    return tuple(Tensor(meta.name, meta.shape, _CUTS.get(meta.name.split(".")[-2])) for meta in metas)


def _stacked(tensors: tuple[Tensor, ...], shape: ModelShape) -> tuple[Tensor, ...]:
    """The experts of a layer in two tensors, which are dealt out whole; single ones are cut."""
    assert shape.moe is not None
    num_experts, inter, hidden = shape.moe.num_experts, shape.moe.intermediate_size, shape.hidden_size
    stacked: list[Tensor] = []
    for tensor in tensors:
        home, expert, leaf = tensor.name.partition(".experts.")
        if leaf == "0.gate_proj.weight":
            stacked.append(Tensor(f"{home}.experts.gate_up_proj", (num_experts, 2 * inter, hidden), 0))
            stacked.append(Tensor(f"{home}.experts.down_proj", (num_experts, hidden, inter), 0))
        elif not expert:
            stacked.append(tensor)
    return tuple(stacked)


def rank_box(tensor: Tensor, rank: int, num_ranks: int) -> Box:
    """What engine rank `rank` holds: its part along `cut`, or the whole tensor."""
    offset, extent = [0] * len(tensor.shape), list(tensor.shape)
    if tensor.cut is not None:
        size = tensor.shape[tensor.cut]
        part = -(-size // num_ranks)
        start = min(rank * part, size)
        offset[tensor.cut], extent[tensor.cut] = start, min(part, size - start)
    return Box(tuple(offset), tuple(extent))
