"""Floors of direct reads against what was measured, against figures by hand, and against any schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.reshard_strategies import Sides, sides
from weightsync.plan import Reads
from weightsync.plan.figures.estimate import (
    DirectFloor,
    LinkRates,
    Receiver,
    direct_floor,
    distances,
)

GIB = 1 << 30
H200 = LinkRates(name="4xh200", hbm=4800, nvlink=382, nic=50)


def receiver(gpu: int, by_trainer: dict[int, int], num_copies: int = 1) -> Receiver:
    return Receiver(name=f"e0 rank {gpu}", gpu=gpu, by_trainer=by_trainer, num_copies=num_copies)


def test_every_rank_from_every_rank_of_one_host() -> None:
    """16 GiB, rows to columns over 4 GPUs: 3 of each rank's 4 GiB come over NVLink; 9.2 ms were measured."""
    ranks = [receiver(gpu, dict.fromkeys(range(4), GIB)) for gpu in range(4)]
    floor = direct_floor(ranks, range(4), 4, H200)
    assert floor.nbytes == (4 * GIB, 12 * GIB, 0)
    assert floor.seconds == pytest.approx(3 * GIB / 382e9)
    assert 0.0082 < floor.seconds < 0.0085
    assert floor.bottleneck == "NVLink into GPU 0"


def test_two_trainers_to_two_engine_ranks_apart() -> None:
    """61 GB of weights, half to each rank: about 80 ms."""
    ranks = [receiver(gpu, {0: 15_265_000_000, 1: 15_265_000_000}) for gpu in (2, 3)]
    floor = direct_floor(ranks, [0, 1], 4, H200)
    assert floor.seconds == pytest.approx(0.080, rel=0.01)


def test_one_trainer_that_all_read_is_the_bottleneck() -> None:
    floor = direct_floor([receiver(gpu, {0: GIB}) for gpu in (1, 2, 3)], [0], 4, H200)
    assert floor.seconds == pytest.approx(3 * GIB / 382e9)
    assert floor.bottleneck == "NVLink out of GPU 0"


def test_own_memory_is_read_and_written() -> None:
    floor = direct_floor([receiver(0, {0: GIB})], [0], 4, H200)
    assert floor.seconds == pytest.approx(2 * GIB / 4800e9)
    assert floor.bottleneck == "memory of GPU 0"


def test_a_host_takes_what_its_ranks_read_through_all_its_nics() -> None:
    floor = direct_floor([receiver(gpu, {0: GIB, 1: 3 * GIB}) for gpu in (4, 5)], [0, 1], 4, H200)
    assert floor.nbytes == (0, 0, 8 * GIB)
    assert floor.seconds == pytest.approx(8 * GIB / 200e9)
    assert [rank.seconds for rank in floor.ranks] == [pytest.approx(4 * GIB / 200e9)] * 2
    assert floor.bottleneck == "NICs into host 1"


def test_without_rates_there_are_no_times() -> None:
    floor = direct_floor([receiver(1, {0: 1536})], [0], 2)
    assert (floor.seconds, floor.cluster) == (None, None)
    assert str(floor).splitlines() == [
        "1 engine rank reads 1.54 kB in 1 copy",
        "all: own GPU 0 B, own host 1.54 kB, other hosts 0 B",
        "e0 rank 1: own GPU 0 B, own host 1.54 kB, other hosts 0 B; 1 copy",
    ]


def test_of_many_ranks_the_first_and_the_slowest_are_shown() -> None:
    ranks = [receiver(gpu, {0: (1 + (gpu == 5)) * GIB}) for gpu in range(1, 8)]
    text = str(direct_floor(ranks, [0], 8, H200)).splitlines()
    assert [line.split(":")[0] for line in text[2:-1]] == ["e0 rank 1", "e0 rank 5, the slowest"]
    assert text[-1] == "on 4xh200: floor 22.5 ms; NVLink out of GPU 0"


def test_a_part_of_the_ranks_says_so() -> None:
    floor = direct_floor([receiver(1, {0: GIB})], [0], 8, H200, num_ranks=100)
    text = str(floor)
    assert floor.is_sample
    assert text.startswith("1 of 100 engine ranks")
    assert "floor at least 2.8 ms" in text
    assert "left out" in text


def test_distances_are_those_of_gpus_and_hosts() -> None:
    assert distances(5, [0, 4, 5, 7, 8], 4) == [2, 1, 0, 1, 2]


def whole(made: Sides, per_host: int, rates: LinkRates) -> tuple[DirectFloor, list[Receiver]]:
    reshard, trainers = made.reshard(), range(len(made.trainers))
    planned = [
        (f"e0 rank {rank}", rank, reshard.reads(rank, distances(rank, trainers, per_host)))
        for rank in range(len(made.ranks))
    ]
    receivers = [
        receiver
        for start in range(0, len(planned), per_host)
        for receiver in Receiver.of_host(planned[start : start + per_host], trainers, per_host)
    ]
    return direct_floor(receivers, trainers, per_host, rates), receivers


def test_what_gpus_of_a_host_read_alike_of_another_goes_over_a_nic_once_and_over_nvlink_else() -> None:
    """1 GiB for two of 2 GPUs: half comes to each, and half from its neighbour."""
    size = np.full(2, GIB // 2)
    table = np.column_stack([np.cumsum(size) - size] * 2 + [np.ones_like(size)] + [size] * 3)
    zeros = np.zeros_like(size)
    reads = Reads.from_table(zeros, ("w",), zeros, ("w",), zeros, table)
    ranks = Receiver.of_host([("r0", 2, reads), ("r1", 3, reads)], [0], 2)
    assert [rank.by_trainer for rank in ranks] == [{0: GIB // 2}] * 2
    assert [rank.passed_on for rank in ranks] == [{3: GIB // 2}, {2: GIB // 2}]
    floor = direct_floor(ranks, [0], 2, H200)
    assert floor.nbytes == (0, GIB, GIB)
    assert floor.seconds == pytest.approx(GIB / 100e9)
    beside = Receiver.of_host([("r0", 2, reads), ("r1", 3, reads)], [4, 2], 2)
    assert [rank.passed_on for rank in beside] == [rank.passed_on for rank in ranks], "of the other trainer"
    near = Receiver.of_host([("r0", 2, reads), ("r1", 3, reads)], [2, 4], 2)
    assert [(rank.by_trainer, rank.passed_on) for rank in near] == [({0: GIB}, {})] * 2, "of its own host"


@given(sides(), st.integers(1, 4), st.tuples(*[st.integers(1, 1000)] * 3))
def test_no_link_carries_more_than_the_floor_allows(
    made: Sides, per_host: int, gb_per_s: tuple[int, int, int]
) -> None:
    rates = LinkRates(name="any", hbm=gb_per_s[0], nvlink=gb_per_s[1], nic=gb_per_s[2])
    floor, receivers = whole(made, per_host, rates)
    came = [
        {**each.by_trainer, **{f"GPU {gpu}": n for gpu, n in each.passed_on.items()}} for each in receivers
    ]
    assert sum(floor.nbytes) == sum(sum(each.values()) for each in came)
    assert floor.seconds is not None
    assert floor.seconds >= max(rank.seconds or 0 for rank in floor.ranks)
    moved = sum(floor.nbytes)
    # All bytes one after another over the slowest; sums of floats may end in another last digit.
    one_link = 2 * moved / (min(gb_per_s) * 1e9) * (1 + 1e-9)
    assert 0 < floor.seconds <= one_link
    assert floor.seconds >= 2 * moved / (rates.hbm * 1e9) / (len(made.trainers) + len(made.ranks))
