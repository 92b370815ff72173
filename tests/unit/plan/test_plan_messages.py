"""Messages: packed, sent and unpacked, round by round, they do what the direct copies do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import PAD
from tests.unit.plan.reshard_strategies import Sides, packs, run, sides, unpacks
from weightsync.errors import ConfigError
from weightsync.plan import Layout, TensorMeta
from weightsync.plan.cross_host.shuffle import Messages, messages
from weightsync.plan.direct.direct import Reshard


@given(sides(), st.sampled_from([256, 300, 1024, 4096, 1 << 20]))
def test_sent_in_messages_equals_gather_then_slice(made: Sides, max_nbytes: int) -> None:
    reshard = made.reshard()
    for rank, near in enumerate(made.near):
        sent = messages(reshard.reads(rank, near), max_nbytes)
        check_shape(sent, max_nbytes)
        expected = made.expected(rank)
        target, written = np.full_like(expected, PAD), np.zeros_like(expected)
        deliver(made, rank, sent, target, written)
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(written, made.live_bytes(rank))


def deliver(made: Sides, rank: int, sent: Messages, target: np.ndarray, written: np.ndarray) -> None:
    """Trainers pack; what they packed is carried to the receive buffer, which is used in every round."""
    sources, own = made.addresses(rank)
    line = made.source_line()
    buffer = np.zeros((sent.offset + sent.nbytes).max(initial=0), np.uint8)
    for turn in range(sent.num_rounds):
        buffer[:] = 0
        for number in sent.of(turn):
            trainer = int(sent.trainer[number])
            memory = {name: at for (t, name), at in sources.items() if t == trainer}
            wire = np.zeros(sent.nbytes[number], np.uint8)
            packed = np.zeros_like(wire)
            run(packs(sent, number, memory), line, wire, packed)
            assert packed.max() == 1
            offset = int(sent.offset[number])
            buffer[offset : offset + len(wire)] = wire
        run(unpacks(sent, turn, own), buffer, target, written)


def check_shape(sent: Messages, max_nbytes: int) -> None:
    """Rounds in order, a message for each trainer in it, side by side, aligned and within the limit."""
    assert (sent.offset + sent.nbytes).max(initial=0) <= max_nbytes
    assert sent.round.tolist() == sorted(sent.round.tolist())
    for turn in range(sent.num_rounds):
        numbers = list(sent.of(turn))
        assert numbers
        trainers = sent.trainer[numbers].tolist()
        assert trainers == sorted(set(trainers))
        ends = 0
        for number in numbers:
            assert sent.offset[number] == -(-ends // 256) * 256
            ends = int(sent.offset[number] + sent.nbytes[number])
    assert (sent.wire % 16 == 0).all()


def test_rounds_are_few_and_nothing_is_cut_without_need() -> None:
    metas = tuple(TensorMeta(f"t{i}", "uint8", (4 << 20,)) for i in range(8))
    columns = {"tensors": metas, "tensor": np.arange(8), "offset": np.zeros((8, 1), np.int64)}
    extent = np.full((8, 1), 4 << 20)
    source = Layout.from_columns(num_ranks=2, rank=np.arange(8) % 2, extent=extent, **columns)
    engine = Layout.from_columns(num_ranks=1, rank=np.zeros(8, np.int32), extent=extent, **columns)
    sent = messages(Reshard(source, "e0", engine).reads(0, [2, 2]), 16 << 20)
    assert sent.num_rounds == 2
    assert sent.nbytes.tolist() == [8 << 20] * 4
    assert len(sent.reads) == 8


def test_no_room() -> None:
    metas = (TensorMeta("t", "uint8", (4,)),)
    columns = {"tensors": metas, "num_ranks": 1, "tensor": np.zeros(1, int), "rank": np.zeros(1, int)}
    layout = Layout.from_columns(**columns, offset=np.zeros((1, 1), np.int64), extent=np.full((1, 1), 4))
    reads = Reshard(layout, "e0", layout).reads(0, [2])
    assert messages(reads, 256).nbytes.tolist() == [16]
    with pytest.raises(ConfigError, match="give at least 256"):
        messages(reads, 255)
