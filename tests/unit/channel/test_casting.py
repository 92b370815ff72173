"""Digests of what is cast equal the trainers', if the right elements came and are held, whatever the cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.channel.casting import Casting, CastingSink
from weightsync.channel.sink import PieceView
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.protocol.messages import Digests

FLOATS = ("bfloat16", "float16", "float32", "float64")


def plan_of(source: RankLayout, engine: RankLayout, bucket_bytes: int) -> Plan:
    """One trainer, and two engines in two dtypes, so that tensors travel in the trainer's."""
    other = RankLayout(source.tensors, source.segments)
    layouts = {name: Layout.from_ranks([layout]) for name, layout in (("cast", engine), ("same", other))}
    members = Members(3, (0,), (("cast", (1,)), ("same", (2,))))
    source_layout = Layout.from_ranks([source])
    return make_plan(source_layout, layouts, members, bucket_bytes=bucket_bytes, max_staging_bytes=1 << 20)


class Held:
    """A sink that holds rows `first` to `end` of each tensor, and digests them."""

    def __init__(self, plan: Plan, dtype: str, first: int, end: int) -> None:
        self.plan, self.first, self.end = plan, first, end
        self.tensors = [torch.zeros(each.shape, dtype=getattr(torch, dtype)) for each in plan.tensors]

    def take(self, bucket: int, pieces: Any) -> None:
        for tensor, box, data in pieces:
            assert data.dtype == self.tensors[tensor].dtype
            self.tensors[tensor][box.slices()] = data

    def written(self, _: object = None) -> None: ...

    def finish(self) -> None: ...

    def box(self, tensor: int) -> Box:
        shape = self.plan.tensors[tensor].shape
        first, end = min(self.first, shape[0]), min(self.end, shape[0])
        return Box((first, *[0] * (len(shape) - 1)), (end - first, *shape[1:]))

    def digests(self) -> Digests:
        found = np.zeros(len(self.tensors), np.uint64)
        for tensor, held in enumerate(self.tensors):
            box = self.box(tensor)
            found[tensor] = tensor_digest(held[box.slices()], held.shape, box)
        return found


@given(st.data())
def test_a_rank_has_the_trainers_digest_of_its_boxes_unless_it_holds_something_else(
    data: st.DataObject,
) -> None:
    travels, holds = data.draw(st.permutations(FLOATS))[:2]
    rows = data.draw(st.integers(1, 9))
    shapes = [(rows, data.draw(st.integers(1, 70))), (rows,)]
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    ours = tuple(TensorMeta(f"t{i}", travels, shape) for i, shape in enumerate(shapes))
    theirs = tuple(TensorMeta(f"t{i}", holds, shape) for i, shape in enumerate(shapes))
    plan = plan_of(
        RankLayout(ours, tuple(map(Segment.whole, ours))),
        RankLayout(theirs, tuple(map(Segment.whole, theirs))),
        data.draw(st.sampled_from([256, 1 << 12])),
    )
    assert [meta.dtype for meta in plan.tensors] == [travels] * 2
    sink = Held(plan, holds, first, end)
    cut = RankLayout(theirs, tuple(segment_of(sink, plan, meta) for meta in theirs))
    casting = Casting(plan, cut)
    assert casting
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(m.shape, generator=draw).to(getattr(torch, m.dtype)) for m in plan.tensors]
    load(plan, CastingSink(sink, casting), values)
    wanted = np.array(
        [tensor_digest(v[sink.box(i).slices()], v.shape, sink.box(i)) for i, v in enumerate(values)],
        np.uint64,
    )
    again = CastingSink(sink, casting)  # nothing comes, as of frozen tensors
    np.testing.assert_array_equal(again.digests(), wanted)
    load(plan, again, values)
    np.testing.assert_array_equal(again.digests(), wanted)
    place = (first,) + (0,) * (len(plan.tensors[0].shape) - 1)
    sink.tensors[0][place] += 1
    assert (again.digests() != wanted).tolist() == [True, False]


def segment_of(sink: Held, plan: Plan, meta: TensorMeta) -> Segment:
    number = next(i for i, each in enumerate(plan.tensors) if each.name == meta.name)
    box = sink.box(number)
    return Segment(meta.name, box, meta.name, 0, box.strides(meta.itemsize))


def load(plan: Plan, sink: CastingSink, values: list[torch.Tensor]) -> None:
    for bucket in plan.buckets():
        pieces: list[PieceView] = [(p.tensor, p.box, values[p.tensor][p.box.slices()]) for p in bucket.pieces]
        sink.take(bucket.index, pieces)
    sink.finish()
