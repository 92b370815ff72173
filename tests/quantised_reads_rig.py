"""Ranks of an engine that read, and quantise, their parts of trainers' tensors: on a GPU or on doubles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tests.quantised import same_bits
from tests.quantised_rig import share
from weightsync.engines.serving.engine_digests import DigestReduction
from weightsync.holder.quantizing_copy import QuantizingCopy
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import meta_of
from weightsync.plan import Box, Layout, Members, RankLayout, Reshard, Segment, TensorMeta, make_plan
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.direct.whole_sources import whole_sources
from weightsync.plan.layout.coverage import covers_all
from weightsync.plan.layout.formats import TOGETHER, Format
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.handles import StoredExport
from weightsync.quantising.quantize import quantize, quantize_together
from weightsync.quantising.quantizing_reads import QuantizingReads
from weightsync.quantising.stored_places import StoredPlaces

SHAPES = {
    "embed.weight": (1000, 96),
    "norm.weight": (96,),
    "q.weight": (512, 256),
    "a.q_proj.weight": (512, 256),
    "a.k_proj.weight": (256, 256),
    "o.weight": (256, 512),
    "m.experts.gate_up_proj": (4, 512, 128),
    "m.experts.down_proj": (4, 128, 256),
    "odd.weight": (300, 200),
}
FULL = ("embed.weight", "norm.weight")
COLUMNS, WHOLE = ("o.",), ("norm.", "odd.")
"""Matrices that ranks cut by columns, and those of which each has all."""
FUSED = ("gate_proj", "up_proj"), ("q_proj", "k_proj")
"""Matrices that share a scale where a format has one for all of a rank's part."""
NUM_RANKS = 2

Locate = Callable[[Mapping[tuple[int, str], torch.Tensor]], Mapping[tuple[int, str], object]]


def trained(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in SHAPES.items()}


def stored(tensors: Mapping[str, torch.Tensor], formats: Mapping[str, Format]) -> dict[str, torch.Tensor]:
    """What a checkpoint stores, with float32 scales."""
    parts = {name: part for whole, each in tensors.items() for name, part in as_loaded(whole, each, SHAPES)}
    found = {name: part for name, part in parts.items() if name not in formats}
    for name in (each for each in formats if each not in found):
        form = formats[name]
        its = form.sharing(name)
        if form.rule in TOGETHER:
            made = quantize_together([parts[each] for each in its], [formats[each] for each in its])
        else:
            made = iter([[*quantize(parts[name], form)]])
        for each, suffixes in zip(its, made, strict=True):
            for suffix, data in suffixes:
                found[each.removesuffix("weight") + suffix] = data.float() if "scale" in suffix else data
    return found


def formats_of(form: Format) -> dict[str, Format]:
    parts = [part for whole, each in trained(0).items() for part in as_loaded(whole, each, SHAPES)]
    return {name: _part_of(form, name, part.shape) for name, part in parts if name not in FULL}


def _part_of(form: Format, name: str, shape: Sequence[int]) -> Format:
    """Return a format itself or, of a rule in `TOGETHER`, that of a rank's part of a matrix."""
    if form.rule not in TOGETHER:
        return form
    fused = (last for last in FUSED if name.endswith(tuple(f".{each}.weight" for each in last)))
    is_whole = ".experts." in name or name.startswith(WHOLE)
    block = [0, 0]
    if not is_whole:
        axis = int(name.startswith(COLUMNS))
        block[axis] = shape[axis] // NUM_RANKS
    return replace(form, block=(block[0], block[1]), together=next(fused, ()))


def box_of(meta: TensorMeta, rank: int) -> Box | None:
    """Return a rank's part of what is stored. Experts are spread over ranks."""
    if ".experts." in meta.name:
        number = int(meta.name.split(".experts.")[1].split(".")[0])
        return Box.whole(meta.shape) if number % NUM_RANKS == rank else None
    if meta.name.startswith(WHOLE):
        return Box.whole(meta.shape)
    return share(meta, rank, NUM_RANKS, axis=int(meta.name.startswith(COLUMNS)))


class Rank:
    """One rank's live parameters, and what it exports."""

    def __init__(self, rank: int, formats: Mapping[str, Format], device: str) -> None:
        metas = [meta_of(name, data) for name, data in stored(trained(0), formats).items()]
        self.boxes = {meta.name: box for meta in metas if (box := box_of(meta, rank))}
        held = [meta for meta in metas if meta.name in self.boxes]
        self.buffers = {meta.name: _buffer(meta.name, formats) for meta in held}
        self.live = {
            self.buffers[meta.name]: torch.zeros(
                self.boxes[meta.name].extent, dtype=getattr(torch, meta.dtype), device=device
            )
            for meta in held
        }
        segments = tuple(
            Segment(
                meta.name,
                box := self.boxes[meta.name],
                self.buffers[meta.name],
                0,
                box.strides(meta.itemsize),
            )
            for meta in held
        )
        self.places = StoredPlaces(segments, self.live, metas, formats)
        self.export: StoredExport = self.places.export(formats)

    def differing(self, wanted: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of parameters with other bytes than the rank's part of `wanted`."""
        return [
            name
            for name, buffer in self.buffers.items()
            if not same_bits(self.live[buffer].cpu(), wanted[name][self.boxes[name].slices()])
        ]


def _buffer(name: str, formats: Mapping[str, Format]) -> str:
    """Return the live parameter of what is stored: one for scales that matrices share."""
    weight = name.removesuffix("_scale")
    is_shared = weight != name and formats[weight].together
    return formats[weight].sharing(weight)[0] + "_scale" if is_shared else name


class ReadsRig:
    """Trainers with rows of all tensors, cut where no block ends, and the ranks of an engine."""

    def __init__(self, form: Format, device: str, locate: Locate, num_trainers: int, near: bool) -> None:
        """`locate` returns what `QuantizingCopy` takes as the trainers' memory, which may be `near`."""
        self.formats = formats_of(form)
        metas = tuple(meta_of(name, data) for name, data in trained(0).items())
        trainers = range(num_trainers)
        boxes = {(rank, meta.name): share(meta, rank, num_trainers) for meta in metas for rank in trainers}
        self.memory = {
            key: torch.zeros(box.extent, dtype=torch.bfloat16, device=device) for key, box in boxes.items()
        }
        self.parts = boxes
        sources = [
            RankLayout(
                metas,
                tuple(
                    Segment(meta.name, box := boxes[rank, meta.name], meta.name, 0, box.strides(2))
                    for meta in metas
                ),
            )
            for rank in trainers
        ]
        source = Layout.from_ranks(sources)
        whole = RankLayout(metas, tuple(map(Segment.whole, metas)))
        self.plan = make_plan(
            source,
            {"e": Layout.from_ranks([whole] * NUM_RANKS)},
            Members(
                num_holders=num_trainers + 2,
                trainers=tuple(trainers),
                engines=(("e", (num_trainers, num_trainers + 1)),),
            ),
            bucket_bytes=1 << 16,
            max_staging_bytes=1 << 17,
            slots=2,
            epoch=1,
        )
        self.ranks = [Rank(rank, self.formats, device) for rank in range(NUM_RANKS)]
        reads = [rank.export.reads(self.plan.tensors) for rank in self.ranks]
        layouts = [reads_layout(self.plan.tensors, self.plan.tied, each) for each in reads]
        engine = Layout.from_ranks(layouts)
        assert covers_all(engine)
        self.reduce = DigestReduction(self.plan, [LayoutTable.of(each) for each in layouts])
        reshard = Reshard(source, "e", engine)
        self.copies: list[QuantizingCopy] = []
        self.scratch: list[torch.Tensor] = []
        self.num_groups: list[int] = []
        self.num_in_place: list[int] = []
        for number, (rank, its) in enumerate(zip(self.ranks, reads, strict=True)):
            found = reshard.reads(number, [1] * num_trainers)
            sources = whole_sources(found) if near else {}
            quantizing = QuantizingReads(self.plan, its, rank.places, sources)
            self.num_groups.append(quantizing.num_groups)
            self.num_in_place.append(len(quantizing.in_place))
            self.scratch.append(torch.zeros(quantizing.nbytes, dtype=torch.uint8, device=device))
            held = {
                (int(t), found.src_names[b]) for t, b in zip(found.trainer, found.src_buffer, strict=True)
            }
            memory = locate({key: self.memory[key] for key in held})
            self.copies.append(QuantizingCopy(quantizing, [found], memory, self.scratch[-1]))  # type: ignore[arg-type]

    def update(self, seed: int, stream: torch.cuda.Stream) -> None:
        """Train, read, and compare each live byte and all digests."""
        tensors = trained(seed)
        for (rank, name), held in self.memory.items():
            held.copy_(tensors[name][self.parts[rank, name].slices()])
        made = []
        for copy in self.copies:
            live = copy.begin(stream, True)
            stream.synchronize()
            made.append(live.result())
        wanted = stored(tensors, self.formats)
        assert [rank.differing(wanted) for rank in self.ranks] == [[], []]
        for rank, each in zip(self.ranks, made, strict=True):
            assert each.are_parts
            rank.places.require(each.stored)
        digests = [tensor_digest(tensors[meta.name], meta.shape) for meta in self.plan.tensors]
        table = self.reduce([each.wholes for each in made])
        assert table.tolist() == [digests] * NUM_RANKS
