"""Which holders share a process, and how many processes start, without any process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.actors.holders import holder_processes
from weightsync.actors.holders.holder_processes import SharedProcesses
from weightsync.actors.holders.holders import Holders
from weightsync.actors.ray.placement import Placement
from weightsync.config import SyncConfig
from weightsync.errors import PeerLostError

GPU = Placement("host a", "10.0.0.1", "cuda:0", 1)
OTHER = Placement("host a", "10.0.0.1", "cuda:1", 2)
FAR = Placement("host b", "10.0.0.2", "cuda:2", 3)
SLOT = Placement("host a", "10.0.0.1", "slot:pid-4", 4)
NEXT = Placement("host a", "10.0.0.1", "slot:pid-5", 5)


class Process:
    """Stands for an actor."""

    def __init__(self, kind: str) -> None:
        self.kind, self.lives = kind, True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=self._answer)

    async def _answer(self, *_: object) -> None:
        if not self.lives:
            raise PeerLostError("holder", "it was killed")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """All processes so far."""
    made: list[Process] = []

    def start(kind: str) -> Process:
        made.append(Process(kind))
        return made[-1]

    monkeypatch.setattr(holder_processes, "spawn_holder", lambda *_: start("own"))
    monkeypatch.setattr(holder_processes, "spawn_parts", lambda *_: start("shared"))
    monkeypatch.setattr(holder_processes, "ask_pid", lambda _: None)
    monkeypatch.setattr(holder_processes.ray, "kill", lambda process: setattr(process, "lives", False))
    return made


def running(started: Sequence[Process]) -> list[str]:
    return [process.kind for process in started if process.lives]


def fleets(number: int = 2, config: SyncConfig | None = None) -> list[Holders]:
    shared = SharedProcesses()
    return [Holders(config or SyncConfig(), None, shared, lambda *_: None) for _ in range(number)]


def plan(slots: int, num_holders: int) -> Any:
    return SimpleNamespace(slots=slots, members=SimpleNamespace(num_holders=num_holders))


def test_a_process_ends_with_its_last_holder(started: list[Process]) -> None:
    async def run() -> None:
        first, second = fleets()
        await first.place([SLOT])
        await asyncio.gather(first.place([SLOT, NEXT]), second.place([SLOT, NEXT]))
        assert running(started) == ["shared"] * 2
        first.close()
        await first.ended()
        assert running(started) == ["shared"] * 2
        await second.place([SLOT])
        assert running(started) == ["shared"]
        second.close()
        assert running(started) == []

    asyncio.run(run())


@pytest.mark.parametrize("is_noticed", [True, False])
def test_fleets_that_lost_a_process_start_one_together(started: list[Process], is_noticed: bool) -> None:
    async def run() -> None:
        both = fleets()
        held = [(await each.place([SLOT]))[0] for each in both]
        started[0].lives = False
        if is_noticed:
            for each, holder in zip(both, held, strict=True):
                each.lost(holder)
        now = await asyncio.gather(*(each.place([SLOT]) for each in both))
        assert running(started) == ["shared"]
        assert len(started) == 2
        for each, holder in zip(both, held, strict=True):
            each.lost(holder)  # said late: the new process stays
        again = await asyncio.gather(*(each.place([SLOT]) for each in both))
        assert (again, len(started)) == (now, 2)

    asyncio.run(run())


def test_a_process_goes_to_its_engines_replacement_once(started: list[Process]) -> None:
    async def run() -> None:
        first, second, third = fleets(3)
        for each in (first, second):
            await each.place([SLOT])
        first.place_late(NEXT, SLOT, 0)
        await third.place([NEXT])
        second.place_late(NEXT, SLOT, 0)
        assert running(started) == ["shared"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "placements", "kind"),
    [
        (SyncConfig(), [GPU, OTHER], "shared"),
        (SyncConfig(), [GPU, FAR], "own"),
        (SyncConfig(mode="broadcast"), [GPU, OTHER], "own"),
        (SyncConfig(mode="broadcast", transport="gloo"), [GPU, FAR], "shared"),
    ],
)
def test_what_moves_by_nccl_has_processes_of_its_own(
    started: list[Process], config: SyncConfig, placements: list[Placement], kind: str
) -> None:
    async def run() -> None:
        first, second = fleets(2, config)
        await first.begin(placements[0], 0)
        await first.place(placements)
        await second.place(placements)
        assert running(started) == [kind] * (2 if kind == "shared" else 4)

    asyncio.run(run())


def test_a_plan_that_broadcasts_by_nccl_takes_holders_out_of_shared_processes(started: list[Process]) -> None:
    async def run() -> None:
        (first,) = fleets(1)
        await first.place([GPU, OTHER])
        assert not first.split(plan(2, 1)), "it has nobody to send to"
        assert first.split(plan(2, 2))
        await first.place([GPU, OTHER])
        assert running(started) == ["own"] * 2
        assert not first.split(plan(2, 2)), "once is enough"
        await first.place([GPU, OTHER])
        assert len(started) == 4
        assert not first.split(plan(0, 2))
        await first.place([GPU, OTHER])
        assert running(started) == ["shared"] * 2

    asyncio.run(run())
