"""A holder that quantises into the parameters of a rank, with doubles of its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.kernel_doubles import Stream
from tests.quantised import same_bits
from weightsync.engines.loading.live_digest import in_order, parameters_of
from weightsync.engines.loading.whole_sink import Loader
from weightsync.holder.quantizing_copy import QuantizingCopy
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import typed
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Reshard, Segment, TensorMeta, make_plan
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.protocol.handles import StoredExport
from weightsync.protocol.messages import HolderDigests
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantizing_reads import QuantizingReads
from weightsync.quantising.quantizing_tables import QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces

Memory = Mapping[str, torch.Tensor]


@torch.no_grad()
def load(loader: Loader, tensors: Memory) -> None:
    """Have an engine's loader take a whole version."""
    loader.load(iter(tensors.items()))
    loader.finish()


def differing(model: nn.Module, wanted: nn.Module) -> list[str]:
    """Return the names of parameters whose bits differ. Both models have the same names."""
    live, found = dict(parameters_of(wanted)), dict(parameters_of(model))
    assert list(found) == list(live)
    return [name for name, each in found.items() if not same_bits(each, live[name])]


def mapped(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters as a holder maps them: bytes, in the order of their memory."""
    return {name: in_order(each.detach()).view(torch.uint8) for name, each in parameters_of(model)}


def read_and_quantised(
    metas: Sequence[TensorMeta], export: StoredExport, live: Memory, tensors: Memory
) -> HolderDigests:
    """Have a holder read what the rank keeps of a trainer's `tensors`, and quantise it into `live`."""
    plan = _plan_of(metas)
    reads = export.reads(plan.tensors)
    quantizing = QuantizingReads(plan, reads, StoredPlaces.of(export, live))
    source, engine = _layout_of(plan.tensors), reads_layout(plan.tensors, plan.tied, reads)
    found = Reshard(Layout.from_ranks([source]), "e", Layout.from_ranks([engine])).reads(0, [1])
    scratch = torch.zeros(quantizing.nbytes, dtype=torch.uint8)
    memory: Any = {(0, name): each for name, each in _held(metas, tensors).items()}
    copy = QuantizingCopy(quantizing, [found], memory, scratch)
    return copy.begin(Stream(), True).result()  # type: ignore[arg-type]


def bucket_by_bucket(
    metas: Sequence[TensorMeta], export: StoredExport, live: Memory, tensors: Memory
) -> HolderDigests:
    """Have a holder quantise the whole tensors of each bucket. Raises NoKernelError if it cannot."""
    plan, held = _plan_of(metas), _held(metas, tensors)
    slots = [torch.zeros(plan.max_bucket_nbytes, dtype=torch.uint8) for _ in range(2)]
    pieces = SlotPieces(plan, slots)
    tables = QuantizingTables(plan, pieces, StoredPlaces.of(export, live), export.formats)
    tables.bind(torch.zeros(tables.nbytes, dtype=torch.uint8))
    for bucket in plan.buckets():
        for piece in bucket.pieces:
            meta = plan.tensors[piece.tensor]
            whole = typed(held[meta.name], meta, Box.whole(meta.shape))
            pieces.view(piece).copy_(whole[piece.box.slices()])
        tables.run(bucket.index, Stream())  # type: ignore[arg-type]
    return tables.result()


def _held(metas: Sequence[TensorMeta], tensors: Memory) -> dict[str, torch.Tensor]:
    """Return a trainer's memory of `metas`, with experts in stacks: uint8, one dimension."""
    shapes, held = {meta.name: meta.shape for meta in metas}, dict[str, torch.Tensor]()
    for meta in metas:
        whole = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
        for name, part in as_loaded(meta.name, whole, shapes):
            part.copy_(tensors[name])
        held[meta.name] = whole.flatten().view(torch.uint8)
    return held


def _layout_of(metas: Iterable[TensorMeta]) -> RankLayout:
    """Return the layout of a trainer with all tensors."""
    metas = tuple(metas)
    return RankLayout(metas, tuple(map(Segment.whole, metas)))


def _plan_of(metas: Sequence[TensorMeta]) -> Plan:
    whole = Layout.from_ranks([_layout_of(metas)])
    members = Members(num_holders=2, trainers=(0,), engines=(("e", (1,)),))
    sizes: Any = {"bucket_bytes": 1 << 14, "max_staging_bytes": 1 << 16, "slots": 2, "epoch": 1}
    return make_plan(whole, {"e": whole}, members, **sizes)
