"""The shuffle's own checks, and its copies on the host; that it arrives is tested between processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.shuffle_cases import make_case
from weightsync import Shuffle, gather_send, scatter_recv
from weightsync.errors import ConfigError, PlanError, StateError
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.plan.layout.copies import Copies, box_copies
from weightsync.transports import Op
from weightsync.transports.base import Send


class NoTransport:
    """Refused input reaches no peer."""

    def start(self, ops: Sequence[Op]) -> object:
        raise AssertionError("nothing should be sent")


NOBODY = NoTransport()


def tensors(memory: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(held) for name, held in memory.items()}


def test_ranks_without_the_role_are_refused() -> None:
    plan = make_case("apart").plan(64 << 10)
    with pytest.raises(ConfigError, match=r"rank: 2 is not valid; in this plan sends one of 0, 1"):
        gather_send(plan, 2, {}, NOBODY)
    with pytest.raises(ConfigError, match=r"rank: 1 is not valid; in this plan receives one of 2, 3, 4"):
        scatter_recv(plan, 1, {}, NOBODY)


def test_ranks_of_both_roles_are_told_what_to_use() -> None:
    plan = make_case("both").plan(64 << 10)
    for call in (gather_send, scatter_recv):
        with pytest.raises(StateError, match=r"rank 0 also .*Shuffle"):
            call(plan, 0, {}, NOBODY)


def test_the_memory_of_each_role_is_needed() -> None:
    case = make_case("both")
    plan, source = case.plan(64 << 10), tensors(case.senders[0].memory)
    with pytest.raises(ConfigError, match="target: None is not valid; rank 0 is of the target"):
        Shuffle(plan, 0, NOBODY, source=source)
    with pytest.raises(ConfigError, match="rank 0 is not of the target: leave it out"):
        Shuffle(make_case("apart").plan(64 << 10), 0, NOBODY, source=source, target=source)


def test_a_missing_or_small_buffer_is_named() -> None:
    case = make_case("apart")
    plan, source = case.plan(64 << 10), tensors(case.senders[0].memory)
    short = {**source, "norm@0": source["norm@0"][:-24]}
    with pytest.raises(PlanError, match="norm@0: the plan uses its bytes 0 to 604, the source memory has"):
        gather_send(plan, 0, short, NOBODY)
    del source["gate@0"]
    with pytest.raises(PlanError, match="gate@0: the source memory has no such buffer"):
        gather_send(plan, 0, source, NOBODY)


def test_buffers_of_another_device_are_refused() -> None:
    case = make_case("apart")
    source = {name: held.to("meta") for name, held in tensors(case.senders[0].memory).items()}
    with pytest.raises(ConfigError, match="memory: 'meta' is not valid"):
        gather_send(case.plan(64 << 10), 0, source, NOBODY)


def test_one_rank_alone_copies_without_a_message() -> None:
    case = make_case("one")
    case.receivers = [0]
    plan = case.plan(256)
    source, target = tensors(case.senders[0].memory), tensors(case.ranks[0].memory)
    shuffle = Shuffle(plan, 0, NOBODY, source=source, target=target)
    shuffle.run()
    assert plan.num_rounds == shuffle.staging_nbytes == 0
    for name, held in case.expected[0].items():
        assert torch.equal(target[name], torch.from_numpy(held))


def test_host_copies_between_any_views_of_shared_storage() -> None:
    whole = torch.arange(4000, dtype=torch.int16)
    source, target = whole[:2000].view(40, 50)[3:30, 7:21], torch.zeros(33, 60, dtype=torch.int16)[2:, 5:]
    size = source.element_size()
    strides = [[stride * size for stride in side.stride()] for side in (source, target)]
    box = (source.shape, size, source.data_ptr(), strides[0], target.data_ptr(), strides[1])
    rows, _ = box_copies([box])
    copies = AddressCopies(Copies(*rows.T), [0, 0, len(rows)], [whole[5:9], source, target])
    copies.run(0)
    assert not target.any()
    copies.run(1)
    assert torch.equal(target[:27, :14], source)
    assert not any(part.any() for part in (target[27:], target[:, 14:]))


def test_host_copies_go_through_parameters() -> None:
    source, target = (torch.nn.Parameter(torch.full((8,), value)) for value in (1.0, 2.0))
    row = (source.data_ptr(), target.data_ptr(), 1, 16, 16, 16)
    AddressCopies(Copies.of([row]), [0, 1], itertools.chain([source], [target])).run(0)
    assert target.tolist() == [1.0] * 4 + [2.0] * 4


class WrongWire:
    """Keeps what is sent, and hands it over with a bit flipped."""

    def __init__(self) -> None:
        self._sent: list[torch.Tensor] = []

    def start(self, ops: Sequence[Op]) -> SimpleNamespace:
        for op in ops:
            if isinstance(op, Send):
                self._sent.append(op.data.clone())
            else:
                op.data.copy_(self._sent.pop(0))
                op.data.view(torch.uint8)[0] ^= 1
        return SimpleNamespace(wait=lambda: None)


def test_a_byte_that_changes_on_its_way_is_noticed_by_nobody() -> None:
    case = make_case("one", rows=20)
    plan, wire, target = case.plan(64 << 10), WrongWire(), tensors(case.ranks[0].memory)
    gather_send(plan, 0, tensors(case.senders[0].memory), wire)
    scatter_recv(plan, 1, target, wire)
    assert any(
        not torch.equal(target[name], torch.from_numpy(held)) for name, held in case.expected[0].items()
    )
