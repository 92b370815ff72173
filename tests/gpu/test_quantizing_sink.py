"""Buckets quantised into live parameters in place have the bytes of the reference on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.quantised import same_bits
from weightsync.channel.sink import PieceView
from weightsync.engines.live_digest import LiveParameters
from weightsync.engines.quantizing_sink import NoKernelError, QuantizingSink, QuantizingTables
from weightsync.engines.stored_places import StoredPlaces
from weightsync.engines.whole_sink import as_loaded
from weightsync.errors import TransportError
from weightsync.memory.digests import tensor_digest
from weightsync.memory.quantize import quantize
from weightsync.memory.tensors import meta_of
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.formats import Format

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp8 blocks": Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    "small blocks": Format(rule="fp8", values="float8_e4m3fn", block=(4, 24)),
    "fp8 channels": Format(rule="compressed-tensors", values="float8_e4m3fn", block=(1, 0)),
    "int8 channels": Format(rule="compressed-tensors", values="int8", block=(1, 0)),
}
SHAPES = {
    "embed.weight": (1000, 96),
    "norm.weight": (96,),
    "a.weight": (512, 96),
    "m.experts.gate_up_proj": (3, 512, 128),
    "m.experts.down_proj": (3, 128, 256),
    "b.weight": (300, 200),
}
NUM_TRAINERS, NUM_RANKS, SLOT_NBYTES = 3, 2, 1 << 16


def trained(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in SHAPES.items()}


def stored(tensors: dict[str, torch.Tensor], form: Format) -> dict[str, torch.Tensor]:
    """What a checkpoint stores, with float32 scales."""
    found = {}
    for whole, tensor in tensors.items():
        for name, part in as_loaded(whole, tensor, SHAPES):
            if name in ("embed.weight", "norm.weight"):
                found[name] = part
                continue
            for suffix, data in quantize(part, form):
                base = name.removesuffix("weight")
                found[base + suffix] = data.float() if "scale" in suffix else data
    return found


def formats(form: Format) -> dict[str, Format]:
    names = (name for whole, tensor in trained(0).items() for name, _ in as_loaded(whole, tensor, SHAPES))
    return {name: form for name in names if name not in ("embed.weight", "norm.weight")}


def plan_of() -> Plan:
    """Rows of three trainers, cut where no block ends, to one engine rank that takes whole tensors."""
    metas = tuple(TensorMeta(name, "bfloat16", shape) for name, shape in SHAPES.items())
    sources = []
    for rank in range(NUM_TRAINERS):
        segments = []
        for meta in metas:
            first, end = (meta.shape[0] * each // NUM_TRAINERS for each in (rank, rank + 1))
            box = Box((first, *[0] * (len(meta.shape) - 1)), (end - first, *meta.shape[1:]))
            segments.append(Segment(meta.name, box, meta.name, 0, box.strides(2)))
        sources.append(RankLayout(metas, tuple(segments)))
    engine = RankLayout(metas, tuple(map(Segment.whole, metas)))
    return make_plan(
        Layout.from_ranks(sources),
        {"e": Layout.from_ranks([engine])},
        Members(num_holders=4, trainers=(0, 1, 2), engines=(("e", (3,)),)),
        bucket_bytes=SLOT_NBYTES,
        max_staging_bytes=2 * SLOT_NBYTES,
        slots=2,
        epoch=1,
    )


class Rig:
    """The second of two ranks, with the later rows of each stored tensor, those of `b` transposed."""

    def __init__(self, form: Format) -> None:
        self.plan, self.form = plan_of(), form
        self.slots = [torch.empty(SLOT_NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        metas = [meta_of(name, data) for name, data in stored(trained(0), form).items()]
        self.rows = {meta.name: meta.shape[0] // NUM_RANKS for meta in metas}
        self.model, segments = nn.Module(), []
        for meta in metas:
            first = self.rows[meta.name]
            box = Box((first, *[0] * (len(meta.shape) - 1)), (meta.shape[0] - first, *meta.shape[1:]))
            held = torch.empty(box.extent, dtype=getattr(torch, meta.dtype), device="cuda")
            name = meta.name.replace(".", "_")
            held = held.t() if meta.name == "b.weight" else held
            self.model.register_parameter(name, nn.Parameter(held, requires_grad=False))
            segments.append(Segment(meta.name, box, name, 0, box.strides(meta.itemsize)))
        live = dict(self.model.named_parameters())
        self.places = StoredPlaces(segments, live, {meta.name: meta.shape for meta in metas}, formats(form))
        self.parameters = LiveParameters(self.model, torch.device("cuda", 0))
        self.tables = QuantizingTables(self.plan, self.slots, self.places)

    def take(self, sink: QuantizingSink, tensors: dict[str, torch.Tensor]) -> None:
        for bucket in self.plan.buckets():
            slot, views = self.slots[bucket.index % 2], list[PieceView]()
            for piece in bucket.pieces:
                data = tensors[self.plan.tensors[piece.tensor].name][piece.box.slices()].contiguous()
                part = slot[piece.offset : piece.offset + piece.nbytes]
                part.copy_(data.view(-1).view(torch.uint8))
                views.append((piece.tensor, piece.box, part.view(torch.bfloat16).view(piece.box.extent)))
            torch.cuda.synchronize()
            sink.take(bucket.index, views)
            slot.fill_(0xAB)

    def sink(self) -> QuantizingSink:
        return QuantizingSink(self.tables, self.plan, self.parameters)

    def differ(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        wanted = {name: data[self.rows[name] :] for name, data in stored(tensors, self.form).items()}
        live = {name: each.detach().cpu() for name, each in self.model.named_parameters()}
        return [
            name
            for name, data in wanted.items()
            if not same_bits(
                live[name.replace(".", "_")], data.t().contiguous() if name == "b.weight" else data
            )
        ]


@pytest.mark.parametrize("name", FORMATS)
def test_live_bytes_are_those_of_the_reference(name: str) -> None:
    rig = Rig(FORMATS[name])
    assert rig.plan.num_buckets > 5
    kept = []
    for seed in (0, 1, 0):
        tensors, sink = trained(seed), rig.sink()
        kept.append(torch.empty(rig.tables.nbytes + seed, dtype=torch.uint8, device="cuda"))  # elsewhere
        rig.take(sink, tensors)
        sink.finish()
        wanted = [tensor_digest(tensors[meta.name], meta.shape) for meta in rig.plan.tensors]
        np.testing.assert_array_equal(sink.digests(), np.array(wanted, np.uint64))
        assert sink.live == rig.parameters.digest()
        assert rig.differ(tensors) == []


def test_a_byte_that_changes_before_verification_fails_the_update() -> None:
    rig = Rig(FORMATS["fp8 blocks"])
    sink = rig.sink()
    rig.take(sink, trained(0))
    rig.tables.wait()
    rig.model.get_parameter("a_weight").data.view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(TransportError, match=r"a\.weight was written, and live memory holds other bytes"):
        sink.finish()


def test_live_parameters_that_a_holder_copied_are_digested_as_they_are() -> None:
    rig = Rig(FORMATS["fp8 channels"])
    sink = rig.sink()
    sink.written()
    sink.finish()
    assert sink.is_copied
    assert not sink.digests().any()
    assert sink.live == rig.parameters.digest()


def test_a_bucket_that_does_not_come_fails_the_update() -> None:
    rig = Rig(FORMATS["fp8 blocks"])
    with pytest.raises(TransportError, match=r"0 of \d+ buckets came"):
        rig.sink().finish()


def test_what_no_kernel_makes_is_named() -> None:
    packed = Format(rule="compressed-tensors", values="int4", block=(1, 8), packed=True)
    with pytest.raises(NoKernelError, match=r"a\.weight: no kernel quantises bfloat16 to int4"):
        Rig(packed)
    with pytest.raises(
        NoKernelError, match=r"experts\.0\.gate_proj\.weight: a block of 100 rows would reach"
    ):
        Rig(Format(rule="fp8", values="float8_e4m3fn", block=(100, 96)))
