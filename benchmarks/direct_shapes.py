"""Layouts of whole mixture-of-experts models on both sides, in columns: what direct planning is timed on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weightsync.plan import Layout, TensorMeta
from weightsync.plan.tensors import ITEMSIZE

__all__ = ["Model", "Part", "engine_layout", "fsdp_layout", "kimi_k2", "megatron_layout", "qwen3_30b_a3b"]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, and where tensor parallelism puts it.

    `cut` is the dimension that is cut, into at most `most` parts (fewer than ranks: KV heads, which
    are replicated). In the engine's parameter `buffer` it comes after `before` global rows of others,
    or, for one of `expert`, after those experts.
    """

    meta: TensorMeta
    layer: int
    cut: int | None = None
    most: int = 1 << 20
    buffer: str = ""
    before: tuple[tuple[int, int], ...] = ()
    expert: int = -1


@dataclass(frozen=True, slots=True)
class Model:
    parts: tuple[Part, ...]
    num_layers: int
    num_experts: int


def qwen3_30b_a3b() -> Model:
    """18,867 tensors, bfloat16."""
    hidden, heads, kv_heads, head, inter, vocab, experts, layers = 2048, 32, 4, 128, 768, 151936, 128, 48
    q, kv = heads * head, kv_heads * head
    parts = [_part("model.embed_tokens", 0, (vocab, hidden), 0)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        qkv = f"{at}.qkv"
        parts += [
            _part(f"{at}.self_attn.q_proj", layer, (q, hidden), 0, buffer=qkv),
            _part(f"{at}.self_attn.k_proj", layer, (kv, hidden), 0, kv_heads, qkv, ((q, 1 << 20),)),
            _part(
                f"{at}.self_attn.v_proj",
                layer,
                (kv, hidden),
                0,
                kv_heads,
                qkv,
                ((q, 1 << 20), (kv, kv_heads)),
            ),
            _part(f"{at}.self_attn.o_proj", layer, (hidden, q), 1),
            _part(f"{at}.self_attn.q_norm", layer, (head,)),
            _part(f"{at}.self_attn.k_norm", layer, (head,)),
            _part(f"{at}.input_layernorm", layer, (hidden,)),
            _part(f"{at}.post_attention_layernorm", layer, (hidden,)),
            _part(f"{at}.mlp.gate", layer, (experts, hidden)),
            *_experts(at, layer, experts, hidden, inter, "bfloat16"),
        ]
    last = layers - 1
    parts += [_part("model.norm", last, (hidden,)), _part("lm_head", last, (vocab, hidden), 0)]
    return Model(tuple(parts), layers, experts)


def kimi_k2() -> Model:
    """70,000 tensors; experts of 1 byte an element."""
    hidden, inter, vocab, experts, layers = 7168, 2048, 163840, 384, 61
    parts = [_part("model.embed_tokens", 0, (vocab, hidden), 0)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        parts += [
            _part(f"{at}.self_attn.q_a_proj", layer, (1536, hidden)),
            _part(f"{at}.self_attn.q_b_proj", layer, (64 * 192, 1536), 0),
            _part(f"{at}.self_attn.kv_a_proj_with_mqa", layer, (576, hidden)),
            _part(f"{at}.self_attn.kv_b_proj", layer, (64 * 256, 512), 0),
            _part(f"{at}.self_attn.o_proj", layer, (hidden, 64 * 128), 1),
            _part(f"{at}.input_layernorm", layer, (hidden,)),
            _part(f"{at}.post_attention_layernorm", layer, (hidden,)),
        ]
        if layer:
            parts += [
                _part(f"{at}.mlp.gate", layer, (experts, hidden)),
                *_experts(at, layer, experts, hidden, inter, "float8_e4m3fn"),
            ]
        shared, width = f"{at}.mlp.shared_experts", inter if layer else 18432
        fused = f"{shared}.gate_up"
        parts += [
            _part(f"{shared}.gate_proj", layer, (width, hidden), 0, buffer=fused),
            _part(f"{shared}.up_proj", layer, (width, hidden), 0, buffer=fused, before=((width, 1 << 20),)),
            _part(f"{shared}.down_proj", layer, (hidden, width), 1),
        ]
    last = layers - 1
    parts += [_part("model.norm", last, (hidden,)), _part("lm_head", last, (vocab, hidden), 0)]
    return Model(tuple(parts), layers, experts)


def _part(
    name: str,
    layer: int,
    shape: tuple[int, ...],
    cut: int | None = None,
    most: int = 1 << 20,
    buffer: str = "",
    before: tuple[tuple[int, int], ...] = (),
) -> Part:
    name = f"{name}.weight"
    return Part(TensorMeta(name, "bfloat16", shape), layer, cut, most, buffer or name, before)


def _experts(at: str, layer: int, experts: int, hidden: int, inter: int, dtype: str) -> list[Part]:
    made = []
    for expert in range(experts):
        name, w13, w2 = f"{at}.mlp.experts.{expert}", f"{at}.mlp.experts.w13", f"{at}.mlp.experts.w2"
        rows = TensorMeta(f"{name}.gate_proj.weight", dtype, (inter, hidden))
        gate = Part(rows, layer, 0, buffer=w13, expert=expert)
        up = replace(rows, name=f"{name}.up_proj.weight")
        down = TensorMeta(f"{name}.down_proj.weight", dtype, (hidden, inter))
        made += [
            gate,
            replace(gate, meta=up, before=((inter, 1 << 20),)),
            Part(down, layer, 1, buffer=w2, expert=expert),
        ]
    return made


@dataclass(frozen=True, slots=True)
class _Columns:
    """A model's parts in columns; a tensor of one dimension has rows of one element."""

    shape: np.ndarray
    itemsize: np.ndarray
    cut: np.ndarray
    most: np.ndarray
    layer: np.ndarray
    expert: np.ndarray

    @classmethod
    def of(cls, model: Model) -> _Columns:
        parts = model.parts
        return cls(
            np.array([(*part.meta.shape, 1)[:2] for part in parts], np.int64),
            np.array([ITEMSIZE[part.meta.dtype] for part in parts], np.int64),
            np.array([-1 if part.cut is None else part.cut for part in parts], np.int64),
            np.array([part.most for part in parts], np.int64),
            np.array([part.layer for part in parts], np.int64),
            np.array([part.expert for part in parts], np.int64),
        )

    def boxes(self, tensor: np.ndarray, part: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Offset and extent of part `part` of `parts` along the tensor's cut."""
        offset, extent = np.zeros((len(tensor), 2), np.int64), self.shape[tensor]
        size = extent.copy()
        for dim in range(2):
            along = self.cut[tensor] == dim
            chunk = -(-size[:, dim] // parts)
            low = np.minimum(chunk * part, size[:, dim])
            offset[along, dim] = low[along]
            extent[along, dim] = np.minimum(chunk, size[:, dim] - low)[along]
        return offset, extent


def fsdp_layout(model: Model, num_ranks: int) -> Layout:
    """Each tensor cut into rows over all ranks, each shard a buffer."""
    columns = _Columns.of(model)
    columns.cut[:] = 0
    tensor, rank = _all(len(model.parts), num_ranks)
    offset, extent = columns.boxes(tensor, rank, np.full(len(tensor), num_ranks))
    return _layout(model, num_ranks, tensor, rank, offset, extent)


def megatron_layout(model: Model, expert: int, pipeline: int, tensor_parallel: int) -> Layout:
    """Pipeline stages of `expert` ranks: experts whole, the rest tensor parallel and replicated."""
    columns = _Columns.of(model)
    stage = columns.layer * pipeline // model.num_layers
    dealt = np.flatnonzero(columns.expert >= 0)
    owner = columns.expert[dealt] * expert // model.num_experts
    others, place = _all(int((columns.expert < 0).sum()), expert)
    others = np.flatnonzero(columns.expert < 0)[others]
    tensor = np.concatenate([dealt, others])
    rank = stage[tensor] * expert + np.concatenate([owner, place])
    parts = np.where(columns.expert[tensor] < 0, tensor_parallel, 1)
    offset, extent = columns.boxes(tensor, rank % parts, parts)
    return _layout(model, expert * pipeline, tensor, rank, offset, extent)


def engine_layout(model: Model, num_ranks: int) -> Layout:
    """Tensor parallel, as vLLM holds it: fused qkv and gate_up, stacked w13 and w2, KV heads replicated."""
    columns = _Columns.of(model)
    tensor, rank = _all(len(model.parts), num_ranks)
    parts = np.minimum(columns.most[tensor], num_ranks)
    offset, extent = columns.boxes(tensor, rank * parts // num_ranks, parts)
    buffers: dict[str, int] = {}
    buffer = np.array([buffers.setdefault(part.buffer, len(buffers)) for part in model.parts])
    before = np.array(
        [sum(rows // min(most, num_ranks) for rows, most in part.before) for part in model.parts], np.int64
    )
    # Rows of one expert in w13 (its gate's and its up's part), or in w2.
    stacked = np.array(
        [
            max(part.expert, 0)
            * (part.meta.shape[0] * 2 // num_ranks if part.cut == 0 else part.meta.shape[0])
            for part in model.parts
        ]
    )
    pitch = extent[:, 1] * columns.itemsize[tensor]
    strides = np.stack([pitch, columns.itemsize[tensor]], axis=1)
    start = (before + stacked)[tensor] * pitch
    return _layout(
        model,
        num_ranks,
        tensor,
        rank,
        offset,
        extent,
        buffer=buffer[tensor],
        buffer_names=tuple(buffers),
        byte_offset=start,
        strides=strides,
    )


def _all(num_tensors: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(num_tensors), num_ranks), np.tile(np.arange(num_ranks), num_tensors)


def _layout(
    model: Model,
    num_ranks: int,
    tensor: np.ndarray,
    rank: np.ndarray,
    offset: np.ndarray,
    extent: np.ndarray,
    **where: object,
) -> Layout:
    metas = tuple(part.meta for part in model.parts)
    return Layout.from_columns(
        tensors=metas,
        num_ranks=num_ranks,
        tensor=tensor,
        rank=rank,
        offset=offset,
        extent=extent,
        **where,  # type: ignore[arg-type]
    )
