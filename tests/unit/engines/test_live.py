"""Buckets into live memory and the digests of what is there, over random shardings of the engine's ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import patient
from weightsync.channel.sink import PieceView
from weightsync.engines.loading import host_writer as host_live
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.engines.serving.engine_digests import DigestReduction
from weightsync.errors import PlanError, StateError, TransportError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.handles import DeviceHandle
from weightsync.protocol.messages import HolderDigests, combine

HANDLE = DeviceHandle("cuda:GPU-1", 7, b"ipc", 0, 8)
SHAPES = {"column": (6, 8), "row": (10, 4), "norm": (5,), "experts": (4, 3, 2)}
AXIS = {"column": 1, "row": 0, "norm": None, "experts": 0}


def meta(name: str, shape: tuple[int, ...] | None = None) -> TensorMeta:
    return TensorMeta(name, "float32", shape or SHAPES[name])


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def cut(shape: tuple[int, ...], axis: int | None, part: int, num_parts: int) -> Box:
    """The part's share of a dimension: uneven where it does not divide."""
    if axis is None:
        return whole(shape)
    bounds = [shape[axis] * i // num_parts for i in range(num_parts + 1)]
    offset, extent = [0] * len(shape), list(shape)
    offset[axis], extent[axis] = bounds[part], bounds[part + 1] - bounds[part]
    return Box(tuple(offset), tuple(extent))


def strides(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(4 * s for s in torch.empty(extent, device="meta").stride())


def rank_layout(boxes: dict[str, Box]) -> RankLayout:
    """Each box in a buffer of its own, but column and row side by side in a fused one."""
    fused = boxes["column"].numel * 4
    segments, buffers = [], []
    for name, box in boxes.items():
        buffer, at = ("fused", 0 if name == "column" else fused) if name in ("column", "row") else (name, 0)
        segments.append(Segment(name, box, buffer, at, strides(box.extent)))
        if buffer == name:
            buffers.append(meta(name, box.extent))
    buffers.append(meta("fused", (boxes["column"].numel + boxes["row"].numel,)))
    return RankLayout(tuple(map(meta, boxes)), tuple(segments), buffers=tuple(buffers))


def source_layout(num_ranks: int) -> list[RankLayout]:
    ranks = []
    for rank in range(num_ranks):
        boxes = {n: cut(s, 0, rank, num_ranks) for n, s in SHAPES.items()}
        segments = tuple(Segment(n, b, n, 0, strides(b.extent)) for n, b in boxes.items() if b.numel)
        ranks.append(RankLayout(tuple(map(meta, SHAPES)), segments))
    return ranks


def views(plan: Plan, bucket: int, tensors: dict[str, torch.Tensor]) -> list[PieceView]:
    return [
        (p.tensor, p.box, tensors[plan.tensors[p.tensor].name][p.box.slices()].contiguous())
        for p in plan.bucket(bucket).pieces
    ]


def build(num_trainers: int, num_shards: int, num_replicas: int) -> tuple[Plan, list[RankLayout]]:
    """An engine of `num_shards` times `num_replicas` ranks: replicas as of KV heads, side by side."""
    ranks = [
        rank_layout({n: cut(s, AXIS[n], shard, num_shards) for n, s in SHAPES.items()})
        for shard in range(num_shards)
        for _ in range(num_replicas)
    ]
    holders = tuple(range(num_trainers, num_trainers + len(ranks)))
    plan = make_plan(
        Layout.from_ranks(source_layout(num_trainers)),
        {"e": Layout.from_ranks(ranks)},
        Members(num_trainers + len(ranks), tuple(range(num_trainers)), (("e", holders),)),
        bucket_bytes=512,
        max_staging_bytes=1 << 20,
    )
    return plan, ranks


def load(plan: Plan, layout: RankLayout, tensors: dict[str, torch.Tensor]):
    live = {buffer.name: torch.full(buffer.shape, 9.0) for buffer in layout.buffers}
    writer = LiveWriter(plan, layout, live, [torch.empty(0, dtype=torch.uint8)])
    writer.begin(live)
    for bucket in range(plan.num_buckets):
        writer.take(bucket, views(plan, bucket, tensors))
    writer.finish()
    return live, writer.digests()


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(0, 2**31))
def test_every_rank_gets_its_part_and_the_ranks_digests_fold_to_the_whole(
    num_trainers: int, num_shards: int, num_replicas: int, seed: int
) -> None:
    plan, ranks = build(num_trainers, num_shards, num_replicas)
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    shares = []
    for layout in ranks:
        live, share = load(plan, layout, tensors)
        shares.append(share)
        for segment in layout.segments:
            wanted = tensors[segment.tensor][segment.box.slices()].reshape(-1)
            at = segment.byte_offset // 4
            assert torch.equal(live[segment.buffer].reshape(-1)[at : at + wanted.numel()], wanted)
    expected = np.array([tensor_digest(tensors[m.name], m.shape) for m in plan.tensors], dtype=np.uint64)
    folded = DigestReduction(plan, [*map(LayoutTable.of, ranks)])(shares)
    assert folded.shape == (len(ranks), len(plan.tensors))
    assert (folded == expected).all()
    if num_shards == 1 and num_replicas == 1:
        assert (combine(shares) == expected).all()


@given(st.sampled_from([1, 2, 4]), st.integers(1, 2), st.data())
def test_a_wrong_share_of_any_rank_shows_in_the_fold(num_shards: int, num_replicas: int, data) -> None:
    plan, ranks = build(1, num_shards, num_replicas)
    tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    shares = [load(plan, layout, tensors)[1] for layout in ranks]
    right = DigestReduction(plan, [*map(LayoutTable.of, ranks)])(shares)
    rank = data.draw(st.integers(0, len(ranks) - 1))
    tensor = data.draw(st.integers(0, len(plan.tensors) - 1))
    shares[rank][tensor] ^= np.uint64(1)
    wrong = (DigestReduction(plan, [*map(LayoutTable.of, ranks)])(shares) != right).any(axis=0)
    assert wrong[tensor]
    assert wrong.sum() == 1


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8, "int64": torch.int64}


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Plan, RankLayout, dict[str, torch.dtype], dict[str, torch.Tensor]]:
    """A plan, an engine rank, its buffers' dtypes, and weights.

    Each tensor has one or two segments, with dimensions in any order. Some are cast when written.
    """
    metas, segments, buffers, dtypes, weights = [], [], [], {}, {}
    draw_bits = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        name, dtype = f"t{number}", draw(st.sampled_from([*DTYPES]))
        made = TensorMeta(name, dtype, shape)
        metas.append(made)
        weights[name] = torch.randint(0, 100, shape, generator=draw_bits).to(DTYPES[dtype])
        axis = draw(st.integers(0, len(shape) - 1)) if shape else None
        for part in range(num_parts := draw(st.integers(1, 2)) if shape else 1):
            box = cut(shape, axis, part, num_parts)
            order = draw(st.permutations(range(len(shape))))
            packed = torch.empty([box.extent[i] for i in order], device="meta").stride()
            by_dimension = dict(zip(order, packed, strict=True))
            steps = tuple(by_dimension[i] * made.itemsize for i in range(len(shape)))
            buffer = f"{name}.{part}"
            segments.append(Segment(name, box, buffer, 0, steps))
            buffers.append(TensorMeta(buffer, dtype, (box.numel,)))
            # Of the same size, since segments count in bytes.
            dtypes[buffer] = torch.int32 if dtype == "float32" and draw(st.booleans()) else DTYPES[dtype]
    engine = RankLayout(tuple(metas), tuple(s for s in segments if s.box.numel), buffers=tuple(buffers))
    sent = [Segment(m.name, whole(m.shape), m.name, 0, _packed(m)) for m in metas]
    plan = make_plan(
        Layout.from_ranks([RankLayout(tuple(metas), tuple(sent))]),
        {"e": Layout.from_ranks([engine])},
        Members(2, (0,), (("e", (1,)),)),
        bucket_bytes=512,
        max_staging_bytes=1 << 20,
    )
    return plan, engine, dtypes, weights


def test_views_with_gaps_of_one_byte_and_of_eight_are_digested_together() -> None:
    """Copies without gaps are aligned to their elements, whatever comes before them."""
    metas = tuple(
        TensorMeta(f"t{i}", dtype, (3, 3)) for i, dtype in enumerate(("uint8", "int64", "bfloat16"))
    )
    columns = tuple(Segment(m.name, whole(m.shape), m.name, 0, _packed(m)[::-1]) for m in metas)
    engine = RankLayout(metas, columns, buffers=metas)
    trainer = RankLayout(metas, tuple(map(Segment.whole, metas)))
    plan = make_plan(
        Layout.from_ranks([trainer]),
        {"e": Layout.from_ranks([engine])},
        Members(2, (0,), (("e", (1,)),)),
        bucket_bytes=512,
        max_staging_bytes=1 << 20,
    )
    live = {m.name: torch.arange(9).view(3, 3).to(DTYPES.get(m.dtype)) for m in metas}
    digests = LiveWriter(plan, engine, live, []).digests()
    assert digests.tolist() == [tensor_digest(live[m.name].T, m.shape) for m in plan.tensors]


def _packed(meta: TensorMeta) -> tuple[int, ...]:
    return tuple(meta.itemsize * step for step in torch.empty(meta.shape, device="meta").stride())


@pytest.mark.parametrize(("chunk_nbytes", "gathered_nbytes"), [(8, 64), (1 << 22, 1 << 20)])
def test_buckets_known_beforehand_are_written_and_digested_as_unknown_ones(
    monkeypatch: pytest.MonkeyPatch, chunk_nbytes: int, gathered_nbytes: int
) -> None:
    monkeypatch.setattr(host_live, "CHUNK_NBYTES", chunk_nbytes)
    monkeypatch.setattr(host_live, "GATHERED_NBYTES", gathered_nbytes)

    @given(laid_out())
    def check(
        made: tuple[Plan, RankLayout, dict[str, torch.dtype], dict[str, torch.Tensor]],
    ) -> None:
        plan, layout, dtypes, weights = made
        buckets = [views(plan, bucket, weights) for bucket in range(plan.num_buckets)]
        results = []
        for known in (buckets, []):
            live = {b.name: torch.zeros(b.shape, dtype=dtypes[b.name]) for b in layout.buffers}
            writer = LiveWriter(plan, layout, live, [], views=known)
            for _ in range(2):
                for memory in live.values():
                    memory.fill_(7)
                writer.begin(live)
                for bucket, pieces in enumerate(buckets):
                    writer.take(bucket, pieces)
                writer.finish()
                results.append((live, writer.digests()))
        expected = [_digest(plan, tensor, layout, dtypes, weights) for tensor in range(len(plan.tensors))]
        for live, digests in results:
            assert digests.tolist() == expected
            for segment in layout.segments:
                wanted = weights[segment.tensor][segment.box.slices()]
                assert torch.equal(
                    segment_view(live[segment.buffer], segment), wanted.to(live[segment.buffer].dtype)
                )

    check()


def _digest(
    plan: Plan,
    tensor: int,
    layout: RankLayout,
    dtypes: dict[str, torch.dtype],
    weights: dict[str, torch.Tensor],
) -> int:
    """Of what is to be in live memory."""
    meta = plan.tensors[tensor]
    shares = [
        tensor_digest(weights[meta.name][s.box.slices()].to(dtypes[s.buffer]), meta.shape, s.box)
        for s in layout.segments
        if s.tensor == meta.name
    ]
    return sum(shares) % 2**64


def test_a_bucket_that_did_not_come_is_missed() -> None:
    plan, (layout,) = build(1, 1, 1)
    live = {buffer.name: torch.zeros(buffer.shape) for buffer in layout.buffers}
    writer = LiveWriter(plan, layout, live, [])
    writer.begin(live)
    with pytest.raises(TransportError, match=f"0 of {plan.num_buckets} buckets"):
        writer.finish()


@pytest.mark.parametrize(
    ("side", "problem"), [("trainers", "norm: no trainer holds"), ("engine", "norm: .* no segment writes")]
)
def test_a_hole_on_either_side_never_becomes_a_plan(side: str, problem: str) -> None:
    _, (engine,) = build(1, 1, 1)
    layouts = {"trainers": source_layout(1)[0], "engine": engine}
    kept = tuple(segment for segment in layouts[side].segments if segment.tensor != "norm")
    layouts[side] = replace(layouts[side], segments=kept)
    with pytest.raises(PlanError, match=problem):
        make_plan(
            Layout.from_ranks([layouts["trainers"]]),
            {"e": Layout.from_ranks([layouts["engine"]])},
            Members(2, (0,), (("e", (1,)),)),
            bucket_bytes=512,
            max_staging_bytes=1 << 20,
        )


def test_a_holders_digests_are_used_once_this_rank_has_taken_the_same() -> None:
    plan, (layout,) = build(1, 1, 1)
    live = {buffer.name: torch.ones(buffer.shape) for buffer in layout.buffers}
    writer = LiveWriter(plan, layout, live, [])
    own = writer.digests()
    writer.written(HolderDigests.of_live(own.copy()))
    np.testing.assert_array_equal(writer.digests(), own)
    made = np.arange(len(plan.tensors), dtype=np.uint64)
    writer.begin(live)
    writer.written(HolderDigests.of_live(made))
    assert writer.digests() is made
    writer.begin(live)
    writer.written()
    np.testing.assert_array_equal(writer.digests(), own)


def test_a_byte_that_changes_after_a_holders_digest_is_found_in_the_first_update_alone() -> None:
    plan, (layout,) = build(1, 1, 1)
    live = {buffer.name: torch.ones(buffer.shape) for buffer in layout.buffers}
    for num_before, is_found in ((0, True), (1, False)):
        writer = LiveWriter(plan, layout, live, [])
        for _ in range(num_before):
            writer.written(HolderDigests.of_live(writer.digests()))
            writer.digests()
        by_holder = LiveWriter(plan, layout, live, []).digests()
        writer.begin(live)
        live["norm"][0] += 1
        writer.written(HolderDigests.of_live(by_holder))
        assert (writer.digests() != by_holder).any() == is_found


def test_a_holder_that_digests_other_memory_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    plan, (layout,) = build(1, 1, 1)
    live = {buffer.name: torch.ones(buffer.shape) for buffer in layout.buffers}
    writer = LiveWriter(plan, layout, live, [])
    own = writer.digests()
    for other in (own + np.uint64(1), own):
        writer.written(HolderDigests.of_live(other))
        np.testing.assert_array_equal(writer.digests(), own)
    live["norm"][0] = 5.0
    writer.written(HolderDigests.of_live(own))
    assert (writer.digests() != own).sum() == 1
    assert caplog.messages == ["a holder's digests of live memory are not used: this rank has others"]


def test_memory_that_moved_is_not_written() -> None:
    plan, (layout,) = build(1, 1, 1)
    live = {buffer.name: torch.zeros(buffer.shape) for buffer in layout.buffers}
    writer = LiveWriter(plan, layout, live, [])
    with pytest.raises(StateError, match="norm is in other memory"):
        writer.begin({**live, "norm": live["norm"].clone()})
    live["norm"].data = live["norm"].clone()  # the same tensor, with other memory
    with pytest.raises(StateError, match="norm is in other memory"):
        writer.begin(live)


def test_memory_can_be_exported_if_all_of_it_is_on_a_gpu_and_no_export_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory(numel: int = 1, *, is_cuda: bool = True) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=is_cuda, numel=lambda: numel)

    def shared(live: Mapping[str, SimpleNamespace]) -> DeviceMemory:
        return DeviceMemory.of({name: HANDLE for name, each in live.items() if each.numel()})

    monkeypatch.setattr("weightsync.engines.loading.live_writer.export_tensors", shared)
    assert exported({"w": memory(), "none": memory(0)}) == DeviceMemory.of({"w": HANDLE})
    assert exported({"w": memory(), "v": memory(is_cuda=False)}) is None
    assert exported({"none": memory(0)}) is None

    def refuse(_: object) -> str:
        raise TransportError("it is in no memory that can be shared")

    monkeypatch.setattr("weightsync.engines.loading.live_writer.export_tensors", refuse)
    assert exported({"w": memory()}) is None


@pytest.mark.parametrize(
    ("asleep", "refuses", "made_to_connect"), [(False, False, 0), (False, True, 1), (True, False, 1)]
)
def test_copies_are_laid_out_to_connect_where_no_holder_is_to_write(
    monkeypatch: pytest.MonkeyPatch, asleep: bool, refuses: bool, made_to_connect: int
) -> None:
    def export(live: object) -> DeviceMemory:
        if refuses:
            raise TransportError("it is in no memory that can be shared")
        return DeviceMemory.of({"w": HANDLE})

    made: list[SimpleNamespace] = []
    copied: list[int] = []

    def copy_table(*_: object) -> SimpleNamespace:
        made.append(SimpleNamespace(launch=lambda bucket, _: copied.append(bucket)))
        return made[-1]

    digests = SimpleNamespace(launch=lambda _: None, result=lambda: None)
    digesting: list[object] = []
    monkeypatch.setattr("weightsync.engines.loading.live_writer.CopyTable", copy_table)
    use_device_doubles(monkeypatch, lambda *args: (digesting.append(args), digests)[1])
    monkeypatch.setattr("weightsync.engines.loading.live_writer.export_tensors", export)
    plan, (layout,) = build(1, 1, 1)
    memory = SimpleNamespace(is_cuda=True, data_ptr=lambda: 64, numel=lambda: 1)
    live = {b.name: memory for b in layout.buffers}
    writer = LiveWriter(plan, layout, live, [memory], readable=not asleep, late=asleep)
    assert len(digesting) == 1, "no load waits for it"
    assert asleep or (writer.export() is None) is refuses
    assert len(made) == made_to_connect
    for bucket in range(plan.num_buckets):
        writer.take(bucket, [])
    assert copied == [*range(plan.num_buckets)]
    assert len(made) == 1


def test_a_late_digest_table_is_made_once_memory_is_exported_and_a_load_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, (layout,) = build(1, 1, 1)
    begun: list[str] = []
    exported, wanted = threading.Event(), np.arange(len(plan.tensors), dtype=np.uint64)

    def export(live: object) -> DeviceMemory:
        assert not begun
        begun.append(threading.current_thread().name)
        return DeviceMemory.of({"w": HANDLE})

    def digest_table(*_: object) -> SimpleNamespace:
        begun.append(threading.current_thread().name)
        assert exported.wait(patient(30)), "the export waited for it"
        return SimpleNamespace(launch=lambda _: None, result=lambda: wanted)

    use_device_doubles(monkeypatch, digest_table)
    monkeypatch.setattr("weightsync.engines.loading.live_writer.export_tensors", export)
    memory = SimpleNamespace(is_cuda=True, data_ptr=lambda: 64, numel=lambda: 1)
    writer = LiveWriter(plan, layout, {b.name: memory for b in layout.buffers}, [memory], late=True)
    assert writer.export()
    exported.set()
    assert (writer.digests() == wanted).all()
    assert (writer.digests() == wanted).all()
    assert begun == [threading.current_thread().name, "weightsync-digests"]


@pytest.mark.parametrize("is_exported", [True, False])
def test_what_a_late_digest_table_lacks_is_said_by_each_load(
    monkeypatch: pytest.MonkeyPatch, is_exported: bool
) -> None:
    def digest_table(*_: object) -> None:
        raise TransportError("the GPU path needs CuPy")

    use_device_doubles(monkeypatch, digest_table)
    monkeypatch.setattr(
        "weightsync.engines.loading.live_writer.export_tensors", lambda _: DeviceMemory.of({"w": HANDLE})
    )
    plan, (layout,) = build(1, 1, 1)
    memory = SimpleNamespace(is_cuda=True, data_ptr=lambda: 64, numel=lambda: 1)
    writer = LiveWriter(plan, layout, {b.name: memory for b in layout.buffers}, [memory], late=True)
    assert not is_exported or writer.export()
    for _ in range(2):
        with pytest.raises(TransportError, match="needs CuPy"):
            writer.digests()


def use_device_doubles(monkeypatch: pytest.MonkeyPatch, digest_table: Callable[..., object]) -> None:
    stream = SimpleNamespace(synchronize=lambda: None, device="cuda:0")
    monkeypatch.setattr("weightsync.engines.loading.live_writer.DigestTable", digest_table)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
