"""Layouts that follow from a mesh travel as its rule, and say the same as boxes do."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weightsync.plan import Box, RankLayout, Reads, Reshard, Segment, TensorMeta
from weightsync.plan.layout.layout import Layout, columns, join_tables
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.segment import Cut, MeshPlace


def strides(extent: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Those of a tensor that torch has made."""
    return Box((0,) * len(extent), tuple(max(1, each) for each in extent)).strides(itemsize)


def sharded(
    metas: Sequence[TensorMeta], mesh: tuple[int, ...], placements: Sequence[Sequence[Placement]]
) -> list[RankLayout]:
    """The layout of each rank of a mesh. Boxes are torch's own."""
    cuts: dict[str, Cut] = {}
    for meta, its in zip(metas, placements, strict=True):
        order = sorted(
            (isinstance(p, _StridedShard), axis) for axis, p in enumerate(its) if not p.is_replicate()
        )
        cuts[meta.name] = tuple((axis, its[axis].dim) for _, axis in order)  # type: ignore[attr-defined]
    ranks = []
    for place in np.ndindex(*mesh):
        segments = []
        for meta, its in zip(metas, placements, strict=True):
            extent, offset = _compute_local_shape_and_global_offset(meta.shape, mesh, list(place), its)
            box = Box(tuple(offset), tuple(extent))
            segments.append(Segment(meta.name, box, meta.name, 0, strides(box.extent, meta.itemsize)))
        ranks.append(
            RankLayout(
                tuple(metas), tuple(segments), device=f"cuda:{place}", mesh=MeshPlace(mesh, place, cuts)
            )
        )
    return ranks


@st.composite
def meshes(draw: st.DrawFn) -> list[RankLayout]:
    """FSDP, HSDP and tensor parallelism, with sizes that leave some ranks fewer rows or none."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    metas, placements = [], []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
        metas.append(TensorMeta(f"t{number}", draw(st.sampled_from(["bfloat16", "float32", "int8"])), shape))
        one = st.just(Replicate()) | st.integers(0, len(shape) - 1).map(Shard)
        placements.append(tuple(draw(st.lists(one, min_size=len(mesh), max_size=len(mesh)))))
    return sharded(metas, mesh, placements)


def boxed(ranks: Sequence[RankLayout]) -> list[LayoutTable]:
    return [LayoutTable.of(replace(rank, mesh=None)) for rank in ranks]


def from_one(ranks: Sequence[RankLayout]) -> list[LayoutTable]:
    """The layouts as the driver has them: that of one rank, and outlines of the others."""
    tables = [LayoutTable.of(rank) for rank in ranks]
    assert len({table.outline().key for table in tables}) == 1
    return [pickle.loads(pickle.dumps(tables[-1].of_rank(table.outline()), protocol=5)) for table in tables]


def same(one: Layout | Reads, other: Layout | Reads) -> bool:
    pairs = zip(columns(one).items(), columns(other).items(), strict=True)
    return all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)


@settings(deadline=None)
@given(meshes())
def test_the_layouts_of_all_ranks_follow_from_that_of_one(ranks: list[RankLayout]) -> None:
    for table, rank, boxes in zip(from_one(ranks), ranks, boxed(ranks), strict=True):
        assert table.rank_layout() == rank
        assert table.alike(boxes)
        assert b"".join(table.memory_content()) == b"".join(boxes.memory_content())
    assert same(join_tables(from_one(ranks)), join_tables(boxed(ranks)))


@settings(deadline=None)
@given(meshes(), st.integers(1, 4), st.data())
def test_reads_are_the_same_from_a_mesh_as_from_boxes(
    ranks: list[RankLayout], size: int, data: st.DataObject
) -> None:
    metas = ranks[0].tensors
    dims = {meta.name: data.draw(st.integers(0, len(meta.shape) - 1)) for meta in metas}
    engine = Layout.from_ranks(
        [RankLayout(metas, tuple(_engine_segment(m, dims, size, r) for m in metas)) for r in range(size)]
    )
    near = data.draw(st.lists(st.integers(0, 2), min_size=len(ranks), max_size=len(ranks)))
    one, other = (Reshard(join_tables(tables), "e", engine) for tables in (from_one(ranks), boxed(ranks)))
    for rank in range(size):
        assert same(one.reads(rank, near), other.reads(rank, near))


def _engine_segment(meta: TensorMeta, dims: Mapping[str, int], size: int, rank: int) -> Segment:
    dim, offset, extent = dims[meta.name], [0] * len(meta.shape), list(meta.shape)
    offset[dim], end = meta.shape[dim] * rank // size, meta.shape[dim] * (rank + 1) // size
    extent[dim] = end - offset[dim]
    box = Box(tuple(offset), tuple(extent))
    return Segment(meta.name, box, meta.name, 0, box.strides(meta.itemsize))


def test_fsdp_cuts_what_tensor_parallelism_has_cut() -> None:
    meta = TensorMeta("w", "bfloat16", (12, 4))
    ranks = sharded([meta], (3, 2), [(_StridedShard(0, split_factor=2), Shard(0))])
    assert [table.rank_layout() for table in from_one(ranks)] == ranks
    assert [each.segments[0].box.offset[0] for each in ranks] == [0, 6, 2, 8, 4, 10]


def test_a_mesh_travels_in_few_bytes() -> None:
    """Of a thousand ranks, each sends some hundred bytes. Boxes are 16 bytes each."""
    metas = [TensorMeta(f"t{number}", "bfloat16", (4096, 64)) for number in range(1000)]
    ranks = sharded(metas, (7,), [(Shard(0),)] * 1000)
    assert len(pickle.dumps(LayoutTable.of(ranks[3]).outline())) < 300


MOVED = Segment("w", Box((2, 0), (2, 3)), "w", 0, (6, 2))


@pytest.mark.parametrize(
    "segment",
    [
        MOVED,
        replace(MOVED, box=Box((0, 0), (2, 3)), strides=(2, 4)),
        replace(MOVED, box=Box((0, 0), (2, 3)), byte_offset=2),
        replace(MOVED, box=Box((0, 0), (2, 3)), buffer="other"),
    ],
)
def test_what_does_not_follow_from_the_mesh_travels_as_boxes(segment: Segment) -> None:
    meta = TensorMeta("w", "bfloat16", (4, 3))
    layout = RankLayout((meta,), (segment,), mesh=MeshPlace((2,), (0,), {"w": ((0, 0),)}))
    table = LayoutTable.of(layout)
    assert (table.rank_layout(), table.mesh) == (layout, ())


def test_ranks_that_differ_have_other_outlines() -> None:
    meta = TensorMeta("w", "bfloat16", (4, 3))
    first, second = sharded([meta], (2,), [(Shard(0),)])
    keys = {
        LayoutTable.of(each).outline().key
        for each in (first, replace(second, mesh=None), replace(first, frozen=("w",)))
    }
    assert len(keys) == 3
