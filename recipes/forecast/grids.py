"""Makes the layouts of trainers and engines from a model's tensors and the parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightsync.errors import ConfigError
from weightsync.plan import Layout, TensorMeta
from weightsync.plan.layout.layout import Bool, Int64, padded
from weightsync.plan.layout.runs import run_segments
from weightsync.recipes.forecast.cuts import BEHIND, Cut, Kind, RankPosition, lay_out, partition
from weightsync.recipes.forecast.parallel import EngineParallel, Fsdp, MegatronOrder, TrainerParallel, Zero
from weightsync.recipes.forecast.shapes import ModelShape
from weightsync.text import count_text

_BUFFER = "e_score_correction_bias"
_ENGINE_VOCAB, _MEGATRON_VOCAB = 64, 128
"""By default vLLM pads a vocabulary to a multiple of this, Megatron to a multiple of this times tp."""


def trainer_layout(tensors: Sequence[TensorMeta], model: ModelShape, parallel: TrainerParallel) -> Layout:
    """Return the layout of trainers for `tensors`, some or all of the model's tensors.

    FSDP cuts by rows like ``torch.chunk``: ranks after the last row hold nothing. ZeRO-3 cuts flattened
    tensors. A router's bias, a buffer, is whole on each rank of both. Megatron's fused parameters have query,
    key and value rows of each group together, and gate rows before up rows.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    if isinstance(parallel, Zero):
        whole = [number for number, meta in enumerate(tensors) if meta.name.endswith(_BUFFER)]
        return _zero_layout(tensors, parallel.num_ranks, model.tied, whole)
    if isinstance(parallel, Fsdp):
        shards = parallel.shards
        positions = [
            RankPosition(rank=rank, dense=(rank % shards, shards), sparse=(rank % shards, shards))
            for rank in range(parallel.num_ranks)
        ]
        return lay_out(tensors, lambda kind: _rows(kind, shards), positions, model.tied)
    _check(model, parallel.tp, parallel.tp if parallel.ep == 1 else 1, "--trainers tp")
    if parallel.pp > model.num_hidden_layers:
        raise ConfigError(
            "--trainers pp", parallel.pp, f"the model has {count_text(model.num_hidden_layers, 'layer')}"
        )
    if not model.mla and model.num_key_value_heads % parallel.tp:
        remedy = f"give a divisor of the {model.num_key_value_heads} key-value heads"
        raise ConfigError("--trainers tp", parallel.tp, remedy)
    num_experts = _num_experts(model, parallel.ep, "--trainers ep")
    positions = [_megatron_position(rank, model, parallel, num_experts) for rank in range(parallel.num_ranks)]
    return lay_out(tensors, lambda kind: _megatron_cut(kind, model, parallel), positions, model.tied)


@dataclass(frozen=True, eq=False)
class TrainersGrid:
    """The trainers' layout of a model, of which segments are made when they are asked for.

    Attributes:
        tensors, model, parallel: as in `trainer_layout`.
    """

    tensors: Sequence[TensorMeta]
    model: ModelShape
    parallel: TrainerParallel

    @property
    def num_ranks(self) -> int:
        return self.parallel.num_ranks

    @cached_property
    def stated(self) -> Layout:
        """All tensors, with segments as in `TrainersLayout`.

        FSDP and ZeRO-3 cut a tensor by its shape, so two of their ranks show which ones are cut alike.
        """
        if isinstance(self.parallel, Fsdp):
            return trainer_layout(self.tensors, self.model, Fsdp(min(self.parallel.shards, 2)))
        if isinstance(self.parallel, Zero):
            return trainer_layout(self.tensors, self.model, Zero(min(self.num_ranks, 2)))
        return self.whole

    @cached_property
    def whole(self) -> Layout:
        """All segments of all ranks."""
        return trainer_layout(self.tensors, self.model, self.parallel)

    def of_tensors(self, kept: Bool) -> Layout:
        """Return the segments of some tensors on all ranks. `kept`: bool[T]. Buffers keep their numbers."""
        if isinstance(self.parallel, MegatronOrder):
            return self.whole.of_tensors(kept)
        tensors = [self.tensors[number] for number in np.flatnonzero(kept).tolist()]
        names = {meta.name for meta in tensors}
        tied = tuple(pair for pair in self.model.tied if pair[1] in names)
        made = trainer_layout(tensors, self.model, self.parallel)
        known = {name: number for number, name in enumerate(self.stated.buffer_names)}
        numbers = np.array([known[name] for name in made.buffer_names], np.int32)
        return replace(made, tied=tied, buffer=numbers[made.buffer], buffer_names=self.stated.buffer_names)


def engine_layout(tensors: Sequence[TensorMeta], model: ModelShape, parallel: EngineParallel) -> Layout:
    """Return the layout of one engine for `tensors`, with vLLM's live parameters.

    These are fused ``qkv_proj`` and ``gate_up_proj`` (and MLA's ``fused_qkv_a_proj``), experts stacked in
    ``w13_weight`` [E, 2F, H] and ``w2_weight`` [E, H, F], key-value heads repeated if there are
    fewer than ranks, and vocabularies padded to a multiple of 64 rows. Live dtypes are the checkpoint's.

    Args:
        tensors: the model's tensors, or all parts of some of the engine's parameters.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    tp, per_group = parallel.tp, parallel.num_ranks // parallel.ep
    _check(model, tp, per_group, "--engine tp")
    _check_vocab(model, tp)
    if not model.mla and model.num_key_value_heads % tp and tp % model.num_key_value_heads:
        remedy = f"give a divisor or a multiple of the {model.num_key_value_heads} key-value heads"
        raise ConfigError("--engine tp", tp, remedy)
    dealt = partition(_num_experts(model, parallel.ep, "--engine ep"), parallel.ep)
    positions = [
        RankPosition(
            rank=rank,
            dense=(rank % tp, tp),
            sparse=(rank % per_group, per_group),
            experts=dealt[rank // per_group],
        )
        for rank in range(parallel.num_ranks)
    ]
    return lay_out(tensors, lambda kind: _engine_cut(kind, model, tp, per_group), positions, model.tied)


def _rows(kind: Kind, shards: int) -> Cut:
    if kind.what == _BUFFER:
        return Cut()
    return Cut(parts=shards, size=-(-kind.meta.shape[0] // shards))


def _megatron_position(
    rank: int, model: ModelShape, parallel: MegatronOrder, num_experts: int
) -> RankPosition:
    """Return a rank's position: tp innermost, then dp. Without expert tensor parallelism, ep is innermost."""
    stage, inside = divmod(rank, parallel.tp * parallel.dp)
    dense = (inside % parallel.tp, parallel.tp)
    first, last = partition(model.num_hidden_layers, parallel.pp)[stage]
    return RankPosition(
        rank=rank,
        dense=dense,
        sparse=dense if parallel.ep == 1 else (0, 1),
        layers=(first, BEHIND + 1 if stage == parallel.pp - 1 else last),
        experts=partition(num_experts, parallel.ep)[inside % parallel.ep],
    )


def _megatron_cut(kind: Kind, model: ModelShape, parallel: MegatronOrder) -> Cut:
    tp = parallel.tp if not kind.is_expert or parallel.ep == 1 else 1
    rows = kind.meta.shape[0]
    if kind.leaf in ("q_proj", "k_proj", "v_proj"):
        groups = model.num_key_value_heads // tp
        queries = model.num_attention_heads // model.num_key_value_heads
        heads = {"q_proj": 0, "k_proj": queries, "v_proj": queries + 1}[kind.leaf]
        pitch, start = (queries + 2) * model.head_dim, heads * model.head_dim
        return Cut(parts=tp, buffer="linear_qkv", blocks=groups, pitch=pitch, start=start)
    if kind.leaf in ("gate_proj", "up_proj"):
        return Cut(parts=tp, buffer="linear_fc1", start=rows // tp if kind.leaf == "up_proj" else 0)
    if kind.leaf in ("embed_tokens", "lm_head"):
        return Cut(parts=tp, size=_round_up(rows, _MEGATRON_VOCAB * tp) // tp)
    return _plain_cut(kind, tp)


def _plain_cut(kind: Kind, tp: int) -> Cut:
    """The cut that Megatron and vLLM share: rows into the heads, columns back."""
    if kind.leaf in ("q_b_proj", "kv_b_proj"):
        return Cut(parts=tp)
    if kind.leaf in ("o_proj", "down_proj"):
        return Cut(axis=1, parts=tp)
    return Cut()


def _engine_cut(kind: Kind, model: ModelShape, tp: int, per_group: int) -> Cut:
    rows, *columns = kind.meta.shape
    if kind.is_expert:
        return _expert_cut(kind, per_group)
    if kind.leaf in ("q_proj", "k_proj", "v_proj"):
        kv_parts = min(tp, model.num_key_value_heads)
        queries = model.num_attention_heads // tp * model.head_dim
        keys = model.num_key_value_heads // kv_parts * model.head_dim
        if kind.leaf == "q_proj":
            return Cut(parts=tp, buffer="qkv_proj", live=(queries + 2 * keys, *columns))
        start = queries if kind.leaf == "k_proj" else queries + keys
        return Cut(parts=kv_parts, buffer="qkv_proj", start=start)
    if kind.leaf == "gate_proj":
        return Cut(parts=tp, buffer="gate_up_proj", live=(2 * (rows // tp), *columns))
    if kind.leaf == "up_proj":
        return Cut(parts=tp, buffer="gate_up_proj", start=rows // tp)
    if model.mla and kind.leaf == "q_a_proj":
        fused = model.mla.q_lora_rank + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        return Cut(buffer="fused_qkv_a_proj", live=(fused, *columns))
    if model.mla and kind.leaf == "kv_a_proj_with_mqa":
        return Cut(buffer="fused_qkv_a_proj", start=model.mla.q_lora_rank)
    if kind.leaf in ("embed_tokens", "lm_head"):
        size = _round_up(rows, _ENGINE_VOCAB) // tp
        return Cut(parts=tp, size=size, live=(size, *columns))
    cut = _plain_cut(kind, tp)
    shape = list(kind.meta.shape)
    shape[cut.axis] //= cut.parts
    return Cut(axis=cut.axis, parts=cut.parts, live=tuple(shape))


def _expert_cut(kind: Kind, parts: int) -> Cut:
    rows, columns = kind.meta.shape
    if kind.leaf == "down_proj":
        return Cut(axis=1, parts=parts, buffer="w2", depth=rows, live=(rows, columns // parts))
    inter = rows // parts
    if kind.leaf == "gate_proj":
        return Cut(parts=parts, buffer="w13", depth=2 * inter, live=(2 * inter, columns))
    return Cut(parts=parts, buffer="w13", depth=2 * inter, start=inter)


def _check(model: ModelShape, tp: int, experts_tp: int, field: str) -> None:
    """Raise ConfigError unless every cut is even."""
    moe = model.moe
    evenly = [(model.num_attention_heads, "attention heads", tp)]
    if model.num_dense_layers:
        evenly.append((model.intermediate_size, "rows of the MLPs", tp))
    if moe:
        evenly.append((moe.num_shared_experts * moe.intermediate_size, "rows of the shared experts", tp))
        evenly.append((moe.intermediate_size, "rows of an expert", experts_tp))
    for count, what, parts in evenly:
        if count % parts:
            raise ConfigError(field, tp, f"the {count} {what} are cut over {parts} ranks; give a divisor")


def _check_vocab(model: ModelShape, tp: int) -> None:
    padded = _round_up(model.vocab_size, _ENGINE_VOCAB)
    if padded % tp:
        raise ConfigError("--engine tp", tp, f"the vocabulary, padded to {padded}, is cut; give a divisor")


def _num_experts(model: ModelShape, ep: int, field: str) -> int:
    num_experts = model.moe.num_experts if model.moe else 0
    if ep > max(num_experts, 1):
        raise ConfigError(field, ep, f"the model has {count_text(num_experts, 'expert')}")
    return num_experts


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _zero_layout(
    tensors: Sequence[TensorMeta], num_ranks: int, tied: tuple[tuple[str, str], ...], whole: Sequence[int]
) -> Layout:
    """Return the layout of ZeRO-3 ranks: equal runs of each tensor's flattened elements.

    `whole` are positions of tensors that are no parameters: each rank has all of them.
    """
    alike: dict[tuple[TensorMeta, int], list[int]] = {}
    buffers = set(whole)
    for number, meta in enumerate(tensors):
        num_parts = 1 if number in buffers else num_ranks
        alike.setdefault((TensorMeta("", meta.dtype, meta.shape), num_parts), []).append(number)
    ndim = max(len(meta.shape) for meta in tensors)
    columns = [
        _zero_columns(meta, numbers, parts, num_ranks, ndim) for (meta, parts), numbers in alike.items()
    ]
    tensor, rank, byte_offset, offset, extent, strides = map(np.concatenate, zip(*columns, strict=True))
    return Layout.from_columns(
        tensors=tuple(tensors),
        num_ranks=num_ranks,
        tensor=tensor.astype(np.int32),
        rank=rank.astype(np.int32),
        offset=offset,
        extent=extent,
        byte_offset=byte_offset,
        strides=strides,
        tied=tied,
    )


def _zero_columns(
    meta: TensorMeta, numbers: Sequence[int], num_parts: int, num_ranks: int, ndim: int
) -> tuple[Int64, ...]:
    """Return the columns of tensors of one shape: tensor, rank, byte offset; offset, extent, strides."""
    size = -(-meta.numel // num_parts)
    held = [
        (rank, segment)
        for rank in range(num_ranks)
        for start in [rank % num_parts * size]
        for segment in run_segments(meta, min(start, meta.numel), min(start + size, meta.numel), "")
    ]
    boxes = [segment.box for _, segment in held]
    times = len(numbers)
    return (
        np.repeat(np.array(numbers, np.int64), len(held)),
        np.tile(np.array([rank for rank, _ in held], np.int64), times),
        np.tile(np.array([segment.byte_offset for _, segment in held], np.int64), times),
        np.tile(padded((box.offset for box in boxes), ndim, 0), (times, 1)),
        np.tile(padded((box.extent for box in boxes), ndim, 1), (times, 1)),
        np.tile(padded((segment.strides for _, segment in held), ndim, 0), (times, 1)),
    )
