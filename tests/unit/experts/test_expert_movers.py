"""One suite for all movers: which rows arrive, and what happens without a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tests.expert_ranks import MOVERS, in_threads, make_tokens, movers
from tests.patience import patient
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, TransportError
from weightsync.experts import ExpertGroup, ForwardingMover, LocalMover, Mover, SharedMemoryMover


def exchanged(
    ends: Sequence[Mover], sent: Sequence[torch.Tensor], needed: torch.Tensor
) -> list[torch.Tensor]:
    """`needed`: bool[R, T, R], whose token is needed by whom."""

    def call(end: Mover, given: torch.Tensor) -> torch.Tensor:
        return end.exchange(given, needed[end.rank].T, needed[:, :, end.rank])

    return in_threads(call, ends, sent)


@pytest.mark.parametrize("kind", MOVERS)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_the_rows_that_are_needed_arrive_and_others_are_zero(kind: str, num_ranks: int) -> None:
    """The longer the rows get, the more memory is needed. What was there before is not seen."""
    draw = torch.Generator().manual_seed(num_ranks)
    with movers(kind, num_ranks) as ends:
        for width, dtype, is_for_all in [
            (1, torch.uint8, True),
            (5, torch.int64, False),
            (7, torch.bfloat16, True),
            (40, torch.float64, False),
            (3, torch.uint8, False),
        ]:
            needed = torch.rand(num_ranks, 6, num_ranks, generator=draw) < 0.5
            shape = (6, width) if is_for_all else (num_ranks, 6, width)
            sent = [torch.randint(1, 100, shape, generator=draw).to(dtype) for _ in ends]
            for end, received in zip(ends, exchanged(ends, sent, needed), strict=True):
                for peer in range(num_ranks):
                    rows = sent[peer] if is_for_all else sent[peer][end.rank]
                    wanted = torch.where(needed[peer, :, end.rank, None], rows, 0)
                    assert torch.equal(received[peer], wanted)
                    assert received.dtype == dtype


@pytest.mark.parametrize("kind", MOVERS)
def test_ranks_may_have_fewer_tokens_or_none(kind: str) -> None:
    needed = torch.ones(2, 4, 2, dtype=torch.bool)
    needed[0], needed[1, 3] = False, False
    sent = [torch.empty(0, 2), torch.arange(1.0, 7).view(3, 2)]
    with movers(kind, 2) as ends:
        for received in exchanged(ends, sent, needed):
            assert torch.equal(received[1], torch.nn.functional.pad(sent[1], (0, 0, 0, 1)))
            assert not received[0].any()


@pytest.mark.parametrize("kind", MOVERS)
def test_parts_of_all_ranks_are_gathered(kind: str) -> None:
    with movers(kind, 3) as ends:
        found = in_threads(lambda end: end.gather(torch.tensor([[end.rank, 7]])), ends)
    assert all(each[:, 0].tolist() == [[0, 7], [1, 7], [2, 7]] for each in found)


@pytest.mark.parametrize("kind", ["local", "shared memory"])
def test_ranks_that_do_not_come_are_named(kind: str) -> None:
    with movers(kind, 3, timeout_s=0.05) as ends:
        for rank, missing in ((2, ("rank 0", "rank 1")), (0, ("rank 1",))):
            with pytest.raises(DeadlineError) as caught:
                ends[rank].gather(torch.zeros(1, 1))
            assert caught.value.missing == missing


def test_a_rank_that_ends_is_noticed_before_the_deadline() -> None:
    with movers("shared memory", 3) as ends:
        in_threads(lambda end: end.gather(torch.zeros(1, 1)), ends)
        ends[1].close()
        begun = time.monotonic()

        def call(end: Mover) -> None:
            with pytest.raises(PeerLostError, match="rank 1 is gone"):
                end.gather(torch.zeros(1, 1))
            with pytest.raises(TransportError, match=r"mover has ended \(rank 1 is gone.*new movers"):
                end.gather(torch.zeros(1, 1))

        in_threads(call, [ends[0], ends[2]])
        with pytest.raises(TransportError, match=r"mover has ended \(it was closed\): make new"):
            ends[1].gather(torch.zeros(1, 1))
    assert time.monotonic() - begun < patient(10)


def test_a_rank_may_close_its_mover_once_it_has_all_rows() -> None:
    with movers("shared memory", 3) as ends:
        for _ in range(20):
            in_threads(lambda end: end.gather(torch.zeros(1, 1)), ends)

        def last(end: SharedMemoryMover) -> None:
            end.gather(torch.ones(1, 1))
            end.close()

        in_threads(last, ends)


def test_ranks_that_cannot_map_each_others_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    problem = r"group: \[0, 1\] is not valid; these ranks do not reach .* use MessageMover"
    with pytest.raises(ConfigError, match=problem), movers("shared memory", 2):
        pass


def test_an_error_of_the_group_says_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_to_all_single", fail)
    with (
        movers("messages", 2) as ends,
        pytest.raises(TransportError, match=r"rank 1 of 2: Connection closed"),
    ):
        ends[1].gather(torch.zeros(1, 1))


def test_a_token_goes_to_each_host_once_and_a_hosts_results_come_back_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token goes to all four experts, one on each rank of two hosts."""
    tokens = make_tokens([5, 3, 0, 4], num_experts=4, top_k=4, hidden=16, empty=0.0)
    across, within = ([LocalMover.ranks(2, patient(20)) for _ in range(2)] for _ in range(2))
    crossed, exchange = list[int](), LocalMover.exchange

    def count(
        end: LocalMover, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor
    ) -> torch.Tensor:
        if sent.shape[-1] == tokens.x[0].shape[1] and any(end in each for each in across):
            crossed.append(int(sends[1 - end.rank].sum()))
        return exchange(end, sent, sends, receives)

    def call(end: Mover) -> None:
        group = ExpertGroup(end, 4, 4, 16, 5)
        given = (each[end.rank] for each in (tokens.x, tokens.ids, tokens.weights))
        rows, _, handle = group.dispatch(*given)
        group.combine(rows, handle)

    monkeypatch.setattr(LocalMover, "exchange", count)
    in_threads(call, [ForwardingMover(across[i][h], within[h][i]) for h in range(2) for i in range(2)])
    assert sum(crossed[:4]) == sum(crossed[4:]) == 12


def test_an_error_that_a_mover_knows_later_is_raised_by_the_mover_above_it() -> None:
    class Late(LocalMover):
        def check(self) -> None:
            raise DeadlineError("exchange", ["rank 0"], 1.0)

    good, (late,) = LocalMover.ranks(1)[0], Late.ranks(1)
    ForwardingMover(good, good).check()
    for movers_of_both in ((late, good), (good, late)):
        with pytest.raises(DeadlineError, match="rank 0"):
            ForwardingMover(*movers_of_both).check()
