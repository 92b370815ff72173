"""Which tensors the benchmarks move, which slice of each an engine rank holds, and what must be in them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightsync.plan import Box

__all__ = [
    "Tensor",
    "count_wrong",
    "fill",
    "llama_like",
    "model_of",
    "poison",
    "qwen3",
    "qwen3_moe",
    "rank_box",
]

_CHUNK_NUMEL = 1 << 25
_MASK = 0x3FFF  # as the bits of a bfloat16: finite, positive and below 2, so that no model overflows
_FACTORS = (0x9E3779B1, 0x85EBCA77)


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
        return qwen3(hidden=64, num_layers=2, num_heads=4, num_kv_heads=4, inter=128, vocab=256, head_dim=16)
    if name in ("moe", "moe-stacked"):
        return qwen3_moe(stacked=name == "moe-stacked", num_layers=num_layers or 48)
    assert name == "8b", name
    return qwen3(hidden=4096, num_layers=num_layers or 36, num_heads=32, num_kv_heads=8, inter=12288)


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


def qwen3(
    *,
    hidden: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    inter: int,
    vocab: int = 151936,
    head_dim: int = 128,
) -> tuple[Tensor, ...]:
    """A dense Qwen3 with a head of its own, by the names of its checkpoint."""
    tensors = [Tensor("model.embed_tokens.weight", (vocab, hidden), 0)]
    for i in range(num_layers):
        at = f"model.layers.{i}"
        tensors += _attention(at, hidden, num_heads, num_kv_heads, head_dim)
        tensors += _feed_forward(f"{at}.mlp", hidden, inter)
    return (*tensors, Tensor("model.norm.weight", (hidden,)), Tensor("lm_head.weight", (vocab, hidden), 0))


def qwen3_moe(*, stacked: bool, num_layers: int) -> tuple[Tensor, ...]:
    """Qwen3-30B-A3B. Stacked experts are dealt out whole, single ones are cut like a dense layer."""
    hidden, inter, vocab, num_experts = 2048, 768, 151936, 128
    tensors = [Tensor("model.embed_tokens.weight", (vocab, hidden), 0)]
    for i in range(num_layers):
        at = f"model.layers.{i}"
        tensors += _attention(at, hidden, 32, 4, 128)
        tensors.append(Tensor(f"{at}.mlp.gate.weight", (num_experts, hidden)))
        if stacked:
            tensors.append(Tensor(f"{at}.mlp.experts.gate_up_proj", (num_experts, 2 * inter, hidden), 0))
            tensors.append(Tensor(f"{at}.mlp.experts.down_proj", (num_experts, hidden, inter), 0))
        else:
            for expert in range(num_experts):
                tensors += _feed_forward(f"{at}.mlp.experts.{expert}", hidden, inter)
    return (*tensors, Tensor("model.norm.weight", (hidden,)), Tensor("lm_head.weight", (vocab, hidden), 0))


def _attention(at: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    return [
        Tensor(f"{at}.self_attn.q_proj.weight", (num_heads * head_dim, hidden), 0),
        Tensor(f"{at}.self_attn.k_proj.weight", (num_kv_heads * head_dim, hidden), 0),
        Tensor(f"{at}.self_attn.v_proj.weight", (num_kv_heads * head_dim, hidden), 0),
        Tensor(f"{at}.self_attn.o_proj.weight", (hidden, num_heads * head_dim), 1),
        Tensor(f"{at}.self_attn.q_norm.weight", (head_dim,)),
        Tensor(f"{at}.self_attn.k_norm.weight", (head_dim,)),
        Tensor(f"{at}.input_layernorm.weight", (hidden,)),
        Tensor(f"{at}.post_attention_layernorm.weight", (hidden,)),
    ]


def _feed_forward(at: str, hidden: int, inter: int) -> list[Tensor]:
    return [
        Tensor(f"{at}.gate_proj.weight", (inter, hidden), 0),
        Tensor(f"{at}.up_proj.weight", (inter, hidden), 0),
        Tensor(f"{at}.down_proj.weight", (hidden, inter), 1),
    ]


def rank_box(tensor: Tensor, rank: int, num_ranks: int) -> Box:
    """What engine rank `rank` holds: its part along `cut`, or the whole tensor."""
    offset, extent = [0] * len(tensor.shape), list(tensor.shape)
    if tensor.cut is not None:
        size = tensor.shape[tensor.cut]
        part = -(-size // num_ranks)
        start = min(rank * part, size)
        offset[tensor.cut], extent[tensor.cut] = start, min(part, size - start)
    return Box(tuple(offset), tuple(extent))


def fill(out: torch.Tensor, tensor: Tensor, box: Box, version: int) -> None:
    """Write what `box` of `tensor` holds in `version`; `out` is 2 bytes an element, of the box's extent."""
    words = out.view(torch.int16)
    for rows, expected in _expected(tensor, box, version, _compute_device(out)):
        words[rows].copy_(expected)


def poison(out: torch.Tensor) -> None:
    """Bytes of 0xFF, which `fill` never writes."""
    out.view(torch.int16).fill_(-1)


def count_wrong(found: torch.Tensor, tensor: Tensor, box: Box, version: int) -> int:
    """How many elements are not, bit for bit, what `fill` writes."""
    words = found.view(torch.int16)
    wrong = [
        (words[rows] != expected.to(words.device)).sum()
        for rows, expected in _expected(tensor, box, version, words.device)
    ]
    return int(torch.stack(wrong).sum()) if wrong else 0


def _expected(
    tensor: Tensor, box: Box, version: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs of the box's first dimension, and the int16 words of each.

    An element's word depends on its tensor, version, row and column. Rows and columns are each
    hashed by themselves, so that displaced ones are found whatever the width of the tensor.
    """
    if not box.numel:
        return
    seed = zlib.crc32(f"{tensor.name}/{version}".encode())
    columns = _hashed(torch.arange(box.offset[-1], box.end[-1], device=device) + seed, _FACTORS[0])
    if box.ndim == 1:
        yield slice(None), columns
        return
    numbers = torch.arange(box.offset[0], box.end[0], device=device)
    for size, low, high in zip(tensor.shape[1:-1], box.offset[1:-1], box.end[1:-1], strict=True):
        numbers = numbers[..., None] * size + torch.arange(low, high, device=device)
    rows = _hashed(numbers, _FACTORS[1])[..., None]
    step = max(1, _CHUNK_NUMEL // max(1, math.prod(box.extent[1:])))
    for start in range(0, box.extent[0], step):
        part = slice(start, start + step)
        yield part, (rows[part] + columns) & _MASK


def _hashed(numbers: torch.Tensor, factor: int) -> torch.Tensor:
    return (((numbers * factor) >> 9) & _MASK).to(torch.int16)


def _compute_device(out: torch.Tensor) -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else out.device
