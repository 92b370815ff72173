"""Layouts found by running a loader on placeholders, against what the loader really writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from weightsync.engines.loading.loader_trace import Traced, UnprovableError, trace
from weightsync.plan import RankLayout, TensorMeta

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCAB, EXPERTS = 8, 4, 4, 2, 12, 13, 3
Weights = Iterable[tuple[str, torch.Tensor]]

CHECKPOINT = {
    "embed.weight": (VOCAB, HIDDEN),
    "q_proj.weight": (HEADS * HEAD, HIDDEN),
    "k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "o_proj.weight": (HIDDEN, HEADS * HEAD),
    "q_proj.bias": (HEADS * HEAD,),
    "norm.weight": (HIDDEN,),
    "scale": (),
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    "mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
}


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, -1.0), requires_grad=False)


class Sharded(nn.Module):
    """One tensor-parallel rank with loaders as vLLM writes them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.q, self.kv = HEADS // size * HEAD, max(1, KV_HEADS // size) * HEAD
        self.rows = -(-VOCAB // 8) * 8 // size
        self.register_parameter("embed", parameter(self.rows, HIDDEN))
        self.lm_head = self.embed
        self.register_parameter("qkv", parameter(self.q + 2 * self.kv, HIDDEN))
        self.register_parameter("bias", parameter(self.q))
        self.register_parameter("o", parameter(HIDDEN, self.q))
        self.register_parameter("norm", parameter(HIDDEN))
        self.register_parameter("scale", parameter(1))
        self.register_parameter("w13", parameter(EXPERTS, 2 * INNER // size, HIDDEN))
        self.register_parameter("w2", parameter(EXPERTS, HIDDEN, INNER // size))
        self.register_buffer("cache", torch.arange(5.0))

    def load_weights(self, weights: Weights) -> set[str]:
        for name, weight in weights:
            if ".experts." in name:
                self.load_expert(name, weight)
            else:
                getattr(self, f"load_{name.split('.')[0]}")(name, weight)
        return set()

    def load_embed(self, name: str, weight: torch.Tensor) -> None:
        start = min(self.rank * self.rows, VOCAB)
        part = weight.narrow(0, start, min(self.rows, VOCAB - start))
        self.embed[: len(part)].data.copy_(part)
        self.embed[len(part) :].data.fill_(0)

    def load_q_proj(self, name: str, weight: torch.Tensor) -> None:
        target = self.bias if name.endswith("bias") else self.qkv.data.narrow(0, 0, self.q)
        target.copy_(weight.narrow(0, self.rank * self.q, self.q))

    def load_k_proj(self, name: str, weight: torch.Tensor, at: int = 0) -> None:
        head = self.rank // max(1, self.size // KV_HEADS)
        self.qkv.data.narrow(0, self.q + at, self.kv).copy_(weight.narrow(0, head * self.kv, self.kv))

    def load_v_proj(self, name: str, weight: torch.Tensor) -> None:
        self.load_k_proj(name, weight, self.kv)

    def load_o_proj(self, name: str, weight: torch.Tensor) -> None:
        self.o.data.copy_(weight.narrow(1, self.rank * self.q, self.q))

    def load_norm(self, name: str, weight: torch.Tensor) -> None:
        self.norm.data.copy_(weight)

    def load_scale(self, name: str, weight: torch.Tensor) -> None:
        self.scale.data.copy_(weight.view(self.scale.shape))

    def load_expert(self, name: str, weight: torch.Tensor) -> None:
        _, _, number, kind, _ = name.split(".")
        inner = INNER // self.size
        if kind == "down_proj":
            self.w2.data[int(number)].copy_(weight.narrow(1, self.rank * inner, inner))
        else:
            half = self.w13.data[int(number)].narrow(0, inner * (kind == "up_proj"), inner)
            half.copy_(weight.narrow(0, self.rank * inner, inner))


def metas_of(shapes: dict[str, tuple[int, ...]] = CHECKPOINT, dtype: str = "float32") -> list[TensorMeta]:
    return [TensorMeta(name, dtype, shape) for name, shape in shapes.items()]


def checkpoint(metas: Iterable[TensorMeta]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {meta.name: torch.randn(meta.shape, generator=draw) for meta in metas}


def unfused(weights: dict[str, torch.Tensor]) -> Weights:
    for name, tensor in weights.items():
        base, _, kind = name.rpartition(".experts.")
        for number in range(EXPERTS if base else 0):
            parts = tensor[number].chunk(2) if kind == "gate_up_proj" else [tensor[number]]
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for each, part in zip(kinds, parts, strict=True):
                yield f"{base}.experts.{number}.{each}.weight", part
        if not base:
            yield name, tensor


def written(layout: RankLayout, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers of the layout as its segments and padding say."""
    buffers = {meta.name: torch.full(meta.shape, float("nan")) for meta in layout.buffers}
    for segment in layout.segments:
        strides = [stride // 4 for stride in segment.strides]
        target = buffers[segment.buffer].as_strided(segment.box.extent, strides, segment.byte_offset // 4)
        target.copy_(weights[segment.tensor][segment.box.slices()])
    for name, offset, nbytes in layout.padding:
        buffers[name].view(-1)[offset // 4 : (offset + nbytes) // 4] = 0
    return buffers


def check(model: nn.Module, metas: list[TensorMeta]) -> Traced:
    """The trace changes nothing but padding, and says what the loader does."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    traced = trace(model, metas, (), "cuda:some")
    weights = checkpoint(metas)
    says = written(traced.layout, weights)
    for name, tensor in model.named_parameters():
        kept = torch.equal(tensor, before[name])
        assert kept or any(entry[0] == name for entry in traced.layout.padding)
        assert tensor is traced.live[name]
    with torch.no_grad():
        model.load_weights(unfused(weights))
    assert says.keys() == dict(model.named_parameters()).keys()
    for name, tensor in model.named_parameters():
        assert torch.equal(says[name], tensor), name
    return traced


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_says_what_a_sharded_loader_does(rank: int, size: int) -> None:
    traced = check(Sharded(rank, size), metas_of())
    assert traced.layout.device == "cuda:some"
    assert {meta.name for meta in traced.layout.tensors} == CHECKPOINT.keys()


def test_padding_is_filled_after_the_proof() -> None:
    model = Sharded(1, 2)
    trace(model, metas_of(), ())
    assert not model.embed[VOCAB - model.rows :].any()
    assert (model.embed[: VOCAB - model.rows] == -1).all()


def test_a_stack_is_one_segment_again() -> None:
    segments = trace(Sharded(0, 1), metas_of(), ()).layout.segments
    boxes = {s.tensor: s.box.extent for s in segments}
    assert len(segments) == len(CHECKPOINT)
    assert boxes == CHECKPOINT


class One(nn.Module):
    """One parameter, and a loader."""

    def __init__(self, load: Callable[[nn.Parameter, torch.Tensor], object], *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)
        self.load = load

    def load_weights(self, weights: Weights) -> set[str]:
        for _, weight in weights:
            self.load(self.weight, weight)
        return {"weight"}


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.data.copy_(w.t()),
        lambda p, w: p.data.t().copy_(w),
        lambda p, w: [p.data[i].copy_(w[:, i]) for i in range(6)],
        lambda p, w: p.data.view(3, 2, 4).copy_(w.t().view(3, 2, 4)),
    ],
    ids=["transposed", "into a transpose", "column by column", "viewed"],
)
def test_views_are_followed(load: Callable[..., object]) -> None:
    model = One(load, 6, 4)
    check(model, [TensorMeta("weight", "float32", (4, 6))])


def test_flat_copies_are_followed() -> None:
    check(One(lambda p, w: p.data.copy_(w.view(-1)), 24), [TensorMeta("w", "float32", (4, 6))])
    check(
        One(lambda p, w: p.data.view(-1).copy_(w.reshape(24)), 2, 12), [TensorMeta("w", "float32", (2, 3, 4))]
    )


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda p, w: p.data.copy_(w.t().contiguous().t()), "computes what it stores"),
        (lambda p, w: p.data.copy_(w * 2), "computes what it stores"),
        (lambda p, w: p.data.copy_(w.to(torch.bfloat16)), "computes what it stores"),
        (lambda p, w: p.data.copy_(w.add_(1)), "add_"),
        (lambda p, w: p.data.copy_(w[:1].expand(4, 6)), "non-rectangular part"),
        (lambda p, w: p.data[:, ::2].copy_(w[:, ::2]), "non-rectangular part"),
        (lambda p, w: p.data[:2].copy_(w[:2]), "no segment writes"),
        (lambda p, w: (p.data.copy_(w), p.data[1].copy_(w[1])), "several segments"),
        (lambda p, w: (p.data.zero_(), p.data.copy_(w)), "several segments"),
        (lambda p, w: p.data.add_(w), "add_"),
        (lambda p, w: torch.mul(w, 2, out=p.data), "mul.out"),
        (lambda p, w: None, "leaves out w"),
        (lambda p, w: p.data.copy_(torch.zeros(4, 6)), "computes what it stores"),
        (lambda p, w: {}["scale"], "KeyError"),
    ],
)
def test_what_cannot_be_proven_is_refused(load: Callable[..., object], says: str) -> None:
    model = One(load, 4, 6)
    with pytest.raises(UnprovableError, match=says):
        trace(model, [TensorMeta("w", "float32", (4, 6))], ())
    assert (model.weight == -1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_float_is_declared_in_the_dtype_that_the_engine_stores(dtype: str) -> None:
    traced = check(Sharded(1, 2), metas_of(dtype=dtype))
    assert {meta.dtype for meta in traced.layout.tensors} == {"float32"}


def test_another_cast_is_refused() -> None:
    model = One(lambda p, w: p.data.copy_(w), 4, 6)
    with pytest.raises(UnprovableError, match=r"weight is torch\.float32, w is int32"):
        trace(model, [TensorMeta("w", "int32", (4, 6))], ())


def test_a_tensor_that_is_stored_in_two_dtypes_is_refused() -> None:
    model = One(lambda p, w: [p.data[:2].copy_(w[:2]), model.rest.data.copy_(w[2:])], 2, 6)
    model.rest = nn.Parameter(torch.zeros(2, 6, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(UnprovableError, match=r"rest is torch\.bfloat16"):
        trace(model, [TensorMeta("w", "float32", (4, 6))], ())


def test_a_parameter_that_nothing_reaches_is_named() -> None:
    model = One(lambda p, w: p.data.copy_(w), 4, 6)
    model.extra = parameter(2)
    with pytest.raises(UnprovableError, match="extra"):
        trace(model, [TensorMeta("w", "float32", (4, 6))], ())


def test_a_swallowed_refusal_still_counts() -> None:
    def load(target: nn.Parameter, weight: torch.Tensor) -> None:
        try:
            target.data.add_(weight)
        except UnprovableError:
            target.data.copy_(weight)

    with pytest.raises(UnprovableError, match="add_"):
        trace(One(load, 4, 6), [TensorMeta("w", "float32", (4, 6))], ())


def test_parameters_that_overlap_are_refused() -> None:
    model = One(lambda p, w: p.data.copy_(w), 4, 6)
    model.part = nn.Parameter(model.weight.data[1:], requires_grad=False)
    with pytest.raises(UnprovableError, match="share their memory"):
        trace(model, [TensorMeta("w", "float32", (4, 6))], ())


def test_a_buffer_of_the_checkpoint_is_live_too() -> None:
    model = One(lambda p, w: (p.data if w.dim() == 2 else model.count).copy_(w), 4, 6)
    model.register_buffer("count", torch.zeros(3))
    model.register_buffer("cache", torch.zeros(3))
    traced = trace(model, [TensorMeta("w", "float32", (4, 6)), TensorMeta("n", "float32", (3,))], ())
    assert traced.live.keys() == {"weight", "count"}
