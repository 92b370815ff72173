"""Layouts by formula: written to numpy buffers, each live parameter is what slicing the tensors gives."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.patience import patient
from tests.unit.recipes.small_models import DENSE, GLM, MLA, MOE, SMALL
from weightsync.errors import ConfigError
from weightsync.plan import Layout, Members, TensorMeta, make_plan
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.runs import run_segments
from weightsync.recipes.forecast.catalog import load, shipped
from weightsync.recipes.forecast.cuts import partition
from weightsync.recipes.forecast.grids import engine_layout, trainer_layout
from weightsync.recipes.forecast.parallel import parse_engine, parse_trainers
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors

Array = npt.NDArray[np.int32]


def values(tensors: Iterable[TensorMeta]) -> dict[str, Array]:
    """Numbers that no two elements of a model share."""
    made, start = {}, 1
    for meta in tensors:
        made[meta.name] = np.arange(start, start + meta.numel, dtype=np.int32).reshape(meta.shape)
        start += meta.numel
    return made


def written(layout: Layout, rank: int, model: dict[str, Array]) -> dict[str, bytearray]:
    """The buffers of one rank after its segments were copied to them; 0 where none was."""
    buffers: dict[str, bytearray] = {}
    for segment in layout.segments(rank):
        box = segment.box
        index = tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))
        cut = model[segment.tensor][index]
        last = segment.byte_offset + sum(
            (size - 1) * stride for size, stride in zip(segment.box.extent, segment.strides, strict=True)
        )
        memory = buffers.setdefault(segment.buffer, bytearray())
        memory.extend(bytes(max(0, last + 4 - len(memory))))
        view = np.ndarray(cut.shape, np.int32, memory, segment.byte_offset, segment.strides)
        assert not view.any()
        view[:] = cut
    return buffers


def live(layout: Layout, rank: int, model: dict[str, Array]) -> dict[str, Array]:
    """The live parameters of one rank."""
    buffers = written(layout, rank, model)
    shaped = {}
    for owner, meta in layout.live.metas:
        if owner == rank:
            memory = bytes(buffers.pop(meta.name, b"")).ljust(meta.nbytes, b"\0")
            shaped[meta.name] = np.frombuffer(memory, np.int32).reshape(meta.shape)
    assert not buffers
    return shaped


def part(array: Array, place: int, places: int, axis: int = 0) -> Array:
    return np.split(array, places, axis)[place]


def experts_of(model: dict[str, Array], home: str, leaf: str, first: int, last: int) -> list[Array]:
    return [model[f"{home}.{expert}.{leaf}.weight"] for expert in range(first, last)]


SIZES = {
    "dense": ["tp=1", "tp=2", "tp=4", "tp=8", "tp=2,dp=2"],
    "moe": ["tp=1", "tp=4", "tp=8", "tp=4,ep=4", "tp=2,dp=2,ep=4", "tp=4,dp=2,ep=2", "tp=2,dp=2"],
    "glm": ["tp=1", "tp=4", "tp=4,ep=4", "tp=4,ep=2"],
    "mla": ["tp=1", "tp=4", "tp=8", "tp=4,ep=4", "tp=2,dp=2,ep=4"],
}
ENGINES = [(name, text) for name, sizes in SIZES.items() for text in sizes]


@pytest.mark.parametrize(("name", "text"), ENGINES)
def test_every_byte_of_every_live_parameter_is_written_once(name: str, text: str) -> None:
    layout = engine_layout(checkpoint_tensors(SMALL[name]), SMALL[name], parse_engine(text))
    check_live("e", layout)
    assert {rank for rank, _ in layout.live.metas} == set(range(layout.num_ranks))


LARGEST = {"deepseek-v3.1", "kimi-k2", "qwen3-235b-a22b"}
"""Models that differ from others of their families in sizes alone; they run with ``-m faults``."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.faults] * (name in LARGEST)) for name in shipped("models")],
)
def test_engines_of_the_shipped_models_are_proven(name: str) -> None:
    model = load(ModelShape, name, field="--model", kind="models")
    tensors = checkpoint_tensors(model)
    for text in ("tp=8", "tp=16,ep=16", "tp=4,dp=2,ep=8") if model.moe else ("tp=1", "tp=8", "tp=16"):
        check_live("e", engine_layout(tensors, model, parse_engine(text)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_dense_engine_holds_what_slicing_gives(tp: int) -> None:
    tensors = checkpoint_tensors(DENSE)
    model, layout = values(tensors), engine_layout(tensors, DENSE, parse_engine(f"tp={tp}"))
    for rank in range(tp):
        got = live(layout, rank, model)
        at = "model.layers.1"
        kv_rank, kv_parts = (rank, tp) if tp <= 2 else (rank // (tp // 2), 2)
        q, k, v = (model[f"{at}.self_attn.{leaf}_proj.weight"] for leaf in "qkv")
        fused = [part(q, rank, tp), part(k, kv_rank, kv_parts), part(v, kv_rank, kv_parts)]
        np.testing.assert_array_equal(got[f"{at}.self_attn.qkv_proj.weight"], np.concatenate(fused))
        mlp = [part(model[f"{at}.mlp.{leaf}_proj.weight"], rank, tp) for leaf in ("gate", "up")]
        np.testing.assert_array_equal(got[f"{at}.mlp.gate_up_proj.weight"], np.concatenate(mlp))
        for leaf in ("self_attn.o_proj", "mlp.down_proj"):
            expected = part(model[f"{at}.{leaf}.weight"], rank, tp, axis=1)
            np.testing.assert_array_equal(got[f"{at}.{leaf}.weight"], expected)
        for leaf in ("model.embed_tokens", "lm_head"):
            padded = np.concatenate([model[f"{leaf}.weight"], np.zeros((58, 24), np.int32)])
            np.testing.assert_array_equal(got[f"{leaf}.weight"], part(padded, rank, tp))
        np.testing.assert_array_equal(
            got[f"{at}.self_attn.q_norm.weight"], model[f"{at}.self_attn.q_norm.weight"]
        )
        assert len(got) == 3 + 3 * 8


@pytest.mark.parametrize(
    ("text", "ep", "cut"),
    [("tp=4", 1, 4), ("tp=4,ep=4", 4, 1), ("tp=4,ep=2", 2, 2), ("tp=2,dp=2,ep=4", 4, 1), ("tp=2,dp=2", 1, 4)],
)
@pytest.mark.parametrize("shape", [MOE, GLM, MLA], ids=["moe", "glm", "mla"])
def test_stacked_experts_are_cut_or_dealt(shape: ModelShape, text: str, ep: int, cut: int) -> None:
    tensors = checkpoint_tensors(shape)
    model, layout = values(tensors), engine_layout(tensors, shape, parse_engine(text))
    home = "model.layers.2.mlp.experts"
    for rank in range(4):
        first, last = partition(6, ep)[rank // cut]
        gate, up = (experts_of(model, home, f"{leaf}_proj", first, last) for leaf in ("gate", "up"))
        pairs = zip(gate, up, strict=True)
        w13 = [np.concatenate([part(g, rank % cut, cut), part(u, rank % cut, cut)]) for g, u in pairs]
        down = experts_of(model, home, "down_proj", first, last)
        got = live(layout, rank, model)
        np.testing.assert_array_equal(got[f"{home}.w13_weight"], np.stack(w13))
        w2 = [part(each, rank % cut, cut, axis=1) for each in down]
        np.testing.assert_array_equal(got[f"{home}.w2_weight"], np.stack(w2))


def test_biases_are_fused_and_shared_experts_are_cut() -> None:
    tensors = checkpoint_tensors(GLM)
    model, layout = values(tensors), engine_layout(tensors, GLM, parse_engine("tp=4,ep=4"))
    got = live(layout, 3, model)
    fused = [part(model[f"model.layers.0.self_attn.{leaf}_proj.bias"], 3, 4) for leaf in "qkv"]
    np.testing.assert_array_equal(got["model.layers.0.self_attn.qkv_proj.bias"], np.concatenate(fused))
    at = "model.layers.1.mlp.shared_experts"
    mlp = [part(model[f"{at}.{leaf}_proj.weight"], 3, 4) for leaf in ("gate", "up")]
    np.testing.assert_array_equal(got[f"{at}.gate_up_proj.weight"], np.concatenate(mlp))


def test_latent_attention_is_fused_where_it_is_not_cut() -> None:
    tensors = checkpoint_tensors(MLA)
    model, layout = values(tensors), engine_layout(tensors, MLA, parse_engine("tp=4"))
    got, at = live(layout, 2, model), "model.layers.0.self_attn"
    fused = [model[f"{at}.{leaf}.weight"] for leaf in ("q_a_proj", "kv_a_proj_with_mqa")]
    np.testing.assert_array_equal(got[f"{at}.fused_qkv_a_proj.weight"], np.concatenate(fused))
    for leaf in ("q_b_proj", "kv_b_proj"):
        np.testing.assert_array_equal(got[f"{at}.{leaf}.weight"], part(model[f"{at}.{leaf}.weight"], 2, 4))


TRAINERS = ["fsdp=1", "fsdp=5", "hsdp=2x3", "zero=1", "zero=5", "tp=2", "tp=2,pp=2", "pp=3,dp=2"]
EXPERT_TRAINERS = ["tp=2,dp=3,ep=6,pp=2", "dp=4,ep=2", "tp=2,dp=2,ep=4,pp=3"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in SMALL for text in TRAINERS),
        *((name, text) for name in SMALL if name != "dense" for text in EXPERT_TRAINERS),
    ],
)
def test_trainers_hold_every_element_and_can_send_it_to_every_engine(name: str, text: str) -> None:
    model = SMALL[name]
    tensors = checkpoint_tensors(model)
    source, engine = trainer_layout(tensors, model, parse_trainers(text)), parse_engine("tp=2")
    members = Members(source.num_ranks + 2, tuple(range(source.num_ranks)), (("e", (0, 1)),))
    plan = make_plan(
        source,
        {"e": engine_layout(tensors, model, engine)},
        members,
        bucket_bytes=4096,
        max_staging_bytes=1 << 20,
    )
    assert plan.total_nbytes == sum(meta.nbytes for meta in tensors)
    assert plan.tensors == tensors


@pytest.mark.parametrize("shards", [1, 3, 4, 16])
def test_fsdp_cuts_as_torch_chunk_does(shards: int) -> None:
    tensors = checkpoint_tensors(GLM)
    layout = trainer_layout(tensors, GLM, parse_trainers(f"fsdp={shards}"))
    for rank in range(shards):
        held = {segment.tensor: segment.box for segment in layout.segments(rank)}
        for meta in tensors:
            chunks = torch.arange(meta.shape[0]).chunk(shards)
            if meta.name.endswith("e_score_correction_bias"):
                assert held[meta.name].extent == meta.shape
            elif rank < len(chunks):
                assert (held[meta.name].offset[0], held[meta.name].extent[0]) == (
                    int(chunks[rank][0]),
                    len(chunks[rank]),
                )
            else:
                assert meta.name not in held


@pytest.mark.parametrize("num_ranks", [1, 3, 7])
def test_zero_cuts_flattened_tensors(num_ranks: int) -> None:
    tensors = checkpoint_tensors(GLM)
    layout = trainer_layout(tensors, GLM, parse_trainers(f"zero={num_ranks}"))
    for rank in range(num_ranks):
        found = layout.segments(rank)
        for meta in tensors:
            size = -(-meta.numel // num_ranks)
            start, stop = min(rank * size, meta.numel), min((rank + 1) * size, meta.numel)
            if meta.name.endswith("e_score_correction_bias"):
                start, stop = 0, meta.numel
            assert [each for each in found if each.tensor == meta.name] == [
                *run_segments(meta, start, stop, meta.name)
            ]


def test_hsdp_repeats_the_shards() -> None:
    layout = trainer_layout(checkpoint_tensors(DENSE), DENSE, parse_trainers("hsdp=2x3"))
    for rank in range(3):
        assert layout.segments(rank) == layout.segments(rank + 3)


def test_megatron_interleaves_query_key_and_value_groups() -> None:
    tensors = checkpoint_tensors(GLM)
    model = values(tensors)
    layout = trainer_layout(tensors, GLM, parse_trainers("tp=2,pp=3"))
    for rank, stage in ((0, 0), (1, 0), (4, 2), (5, 2)):
        got, at, place = written(layout, rank, model), f"model.layers.{stage}.self_attn", rank % 2
        for what in ("weight", "bias"):
            q, k, v = (part(model[f"{at}.{leaf}_proj.{what}"], place, 2) for leaf in "qkv")
            groups = [np.concatenate([part(x, g, 2) for x in (q, k, v)]) for g in range(2)]
            assert bytes(got[f"{at}.linear_qkv.{what}"]) == np.concatenate(groups).tobytes()
    names = {segment.tensor for segment in layout.segments(0)}
    assert "model.embed_tokens.weight" in names
    assert not {"lm_head.weight", "model.norm.weight"} & names
    assert {"lm_head.weight", "model.norm.weight"} <= {segment.tensor for segment in layout.segments(4)}


def test_megatron_deals_experts_and_repeats_them_over_the_other_ranks() -> None:
    layout = trainer_layout(checkpoint_tensors(MOE), MOE, parse_trainers("tp=2,dp=2,ep=2"))
    held = [
        sorted({int(s.tensor.split(".")[5]) for s in layout.segments(rank) if ".experts." in s.tensor})
        for rank in range(4)
    ]
    assert held == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", SMALL)
def test_some_tensors_are_a_part_of_the_whole(name: str) -> None:
    model, tensors = SMALL[name], checkpoint_tensors(SMALL[name])
    some = tuple(meta for meta in tensors if ".layers.1." in meta.name)
    engine, trainers = parse_engine("tp=4"), parse_trainers("tp=2,pp=3")
    check_live("e", engine_layout(some, model, engine))
    few = trainer_layout(some, model, trainers)
    full = trainer_layout(tensors, model, trainers)
    for rank in range(full.num_ranks):
        assert [s for s in full.segments(rank) if ".layers.1." in s.tensor] == list(few.segments(rank))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dense", "tp=3", "--engine tp: 3 is not valid; the 8 attention heads are cut over 3 ranks"),
        ("moe", "tp=8,dp=8", "--engine tp: 8 is not valid; the 16 rows of an expert are cut over 64 ranks"),
        ("moe", "tp=8,ep=8", "--engine ep: 8 is not valid; the model has 6 experts"),
        ("dense", "tp=2,ep=2", "--engine ep: 2 is not valid; the model has 0 experts"),
    ],
)
def test_engines_that_cannot_be_cut_so(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_layout(checkpoint_tensors(SMALL[name]), SMALL[name], parse_engine(text))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dense", "tp=4", "--trainers tp: 4 is not valid; give a divisor of the 2 key-value heads"),
        ("dense", "pp=4", "--trainers pp: 4 is not valid; the model has 3 layers"),
        ("moe", "dp=7,ep=7", "--trainers ep: 7 is not valid; the model has 6 experts"),
        ("mla", "tp=16", "--trainers tp: 16 is not valid; the 8 attention heads are cut over 16 ranks"),
    ],
)
def test_trainers_that_cannot_be_cut_so(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_layout(checkpoint_tensors(SMALL[name]), SMALL[name], parse_trainers(text))
    assert says in str(caught.value)


def test_names_of_no_checkpoint_are_refused() -> None:
    with pytest.raises(ConfigError, match="'weight' is not valid"):
        engine_layout((TensorMeta("weight", "int8", (4,)),), DENSE, parse_engine("tp=1"))


def test_large_models_are_laid_out_in_seconds() -> None:
    """This thread's CPU seconds, of which there are 0.3 and 1.5 on a quick core."""
    for name, text, limit in (("qwen3-30b-a3b", "tp=8", 3.0), ("kimi-k2", "tp=16", 15.0)):
        model = load(ModelShape, name, field="--model", kind="models")
        tensors = checkpoint_tensors(model)
        start = time.thread_time()
        layout = engine_layout(tensors, model, parse_engine(text))
        source = trainer_layout(tensors, model, parse_trainers("fsdp=8"))
        assert time.thread_time() - start < patient(limit)
        assert len(source.tensor) + len(layout.tensor) > 16 * (len(tensors) - 1000)
