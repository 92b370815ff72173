"""A rank whose live parameters are quantised in place, on a GPU or on doubles of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from tests.quantised import same_bits
from weightsync.channel.sink import PieceView
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.engines.loading.quantizing_sink import QuantizingSink
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import meta_of
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.layout.formats import Format
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantize import quantize
from weightsync.quantising.quantizing_tables import QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces

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
    "c.weight": (256, 96),
    "e.weight": (128, 96),
}
WHOLE = "c."
"""Tensors that come in one piece, from one trainer."""

ELSEWHERE = "e."
"""Tensors that only the other rank holds."""
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


def rows_of_trainers(metas: tuple[TensorMeta, ...]) -> list[RankLayout]:
    """Rows of three trainers, cut where no block ends."""
    sources = []
    for rank in range(NUM_TRAINERS):
        segments = []
        for meta in metas:
            is_whole = meta.name.startswith(WHOLE)
            box = Box.whole(meta.shape) if is_whole else share(meta, rank, NUM_TRAINERS)
            if box.numel and (rank == 1 or not is_whole):
                segments.append(Segment(meta.name, box, meta.name, 0, box.strides(meta.itemsize)))
        sources.append(RankLayout(metas, tuple(segments)))
    return sources


def plan_of(metas: tuple[TensorMeta, ...], sources: Sequence[RankLayout]) -> Plan:
    """Plan for one engine rank that takes whole tensors."""
    num = len(sources)
    engine = RankLayout(metas, tuple(map(Segment.whole, metas)))
    return make_plan(
        Layout.from_ranks(sources),
        {"e": Layout.from_ranks([engine])},
        Members(num_holders=num + 1, trainers=tuple(range(num)), engines=(("e", (num,)),)),
        bucket_bytes=SLOT_NBYTES,
        max_staging_bytes=2 * SLOT_NBYTES,
        slots=2,
        epoch=1,
    )


def share(meta: TensorMeta, rank: int, num_ranks: int, axis: int = 0) -> Box:
    """Return the part of a tensor that is between those of the ranks before and after, along `axis`."""
    first, end = (meta.shape[axis] * each // num_ranks for each in (rank, rank + 1))
    extent = [*meta.shape[:axis], end - first, *meta.shape[axis + 1 :]]
    return Box(tuple(first if each == axis else 0 for each in range(len(extent))), tuple(extent))


def _axis(meta: TensorMeta) -> int:
    return int("down_proj" in meta.name and len(meta.shape) > 1)


class Rig:
    """The second of two ranks, with later rows of what is stored, later columns of ``down_proj``.

    `b` is transposed. With `sends_stored`, trainers have quantised.
    """

    def __init__(self, form: Format, device: str, *, sends_stored: bool = False) -> None:
        self.form, self.device, self.sends_stored = form, torch.device(device), sends_stored
        sent = tuple(meta_of(name, data) for name, data in self.sent(trained(0)).items())
        self.plan = plan_of(sent, rows_of_trainers(sent))
        self.slots = [torch.empty(SLOT_NBYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        metas = [meta_of(name, data) for name, data in stored(trained(0), form).items()]
        self.boxes = {meta.name: share(meta, NUM_RANKS - 1, NUM_RANKS, axis=_axis(meta)) for meta in metas}
        self.model, segments = nn.Module(), []
        for meta in (meta for meta in metas if not meta.name.startswith(ELSEWHERE)):
            box = self.boxes[meta.name]
            held = torch.empty(box.extent, dtype=getattr(torch, meta.dtype), device=device)
            name = meta.name.replace(".", "_")
            held = held.t() if meta.name == "b.weight" else held
            self.model.register_parameter(name, nn.Parameter(held, requires_grad=False))
            segments.append(Segment(meta.name, box, name, 0, box.strides(meta.itemsize)))
        live = dict(self.model.named_parameters())
        self.places = StoredPlaces(segments, live, metas, formats(form))
        self.parameters = LiveParameters(self.model, self.device)
        formats_left = {} if sends_stored else self.places.formats
        pieces = SlotPieces(self.plan, self.slots)
        self.tables = QuantizingTables(self.plan, pieces, self.places, formats_left)
        self.tables.bind(torch.empty(self.tables.nbytes, dtype=torch.uint8, device=device))

    def sent(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what trainers send of their weights."""
        return stored(tensors, self.form) if self.sends_stored else tensors

    def take(
        self, sink: QuantizingSink, tensors: dict[str, torch.Tensor], num_buckets: int | None = None
    ) -> None:
        """Have `sink` take all buckets of `tensors`, or the first `num_buckets`."""
        sent = self.sent(tensors)
        for bucket in itertools.islice(self.plan.buckets(), num_buckets):
            slot, views = self.slots[bucket.index % 2], list[PieceView]()
            for piece in bucket.pieces:
                data = sent[self.plan.tensors[piece.tensor].name][piece.box.slices()].contiguous()
                part = slot[piece.offset : piece.offset + piece.nbytes]
                part.copy_(data.view(-1).view(torch.uint8))
                views.append((piece.tensor, piece.box, part.view(data.dtype).view(piece.box.extent)))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            sink.take(bucket.index, views)
            slot.fill_(0xAB)

    def sink(self) -> QuantizingSink:
        return QuantizingSink(self.tables, self.plan, self.parameters)

    def differ(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        whole = stored(tensors, self.form)
        wanted = {
            name: data[self.boxes[name].slices()].contiguous()
            for name, data in whole.items()
            if not name.startswith(ELSEWHERE)
        }
        live = {name: each.detach().cpu() for name, each in self.model.named_parameters()}
        return [
            name
            for name, data in wanted.items()
            if not same_bits(
                live[name.replace(".", "_")], data.t().contiguous() if name == "b.weight" else data
            )
        ]

    def check_updates(self) -> None:
        """Take three updates, each by way of other memory, and compare every byte and digest."""
        assert self.plan.num_buckets > 5
        kept = []
        for seed in (0, 1, 0):
            tensors, sink = trained(seed), self.sink()
            kept.append(torch.empty(self.tables.nbytes + seed, dtype=torch.uint8, device=self.device))
            self.take(sink, tensors)
            sink.finish()
            sent = self.sent(tensors)
            wanted = [tensor_digest(sent[meta.name], meta.shape) for meta in self.plan.tensors]
            np.testing.assert_array_equal(sink.digests(), np.array(wanted, np.uint64))
            assert sink.live == self.parameters.digest()
            assert self.differ(tensors) == []
