"""Ranks of one transport, each a process of its own that can be stopped and killed: `Fleet`.

A process gets orders, each a method of `Rank` and its arguments, and answers each once or more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.forked import forking
from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.transports import Broadcast, Transport, transport_class

READY_S = patient(120)
"""Importing torch and cupy on a busy machine."""


class Rank:
    """What one process does on order."""

    def __init__(self, name: str, say: Callable[[object], None]) -> None:
        self._name, self._say = name, say
        self._device = "cuda" if name == "nccl" else "cpu"
        self._transport: Transport | None = None

    def offer(self) -> str:
        self._transport = transport_class(self._name)()
        return self._transport.offer("127.0.0.1")

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> float:
        self._transport = self._transport or transport_class(self._name)()
        started = time.monotonic()
        self._transport.open(rendezvous, rank, num_ranks, timeout_s)
        return time.monotonic() - started

    def broadcast(self, root: int, value: int, nbytes: int, times: int) -> int:
        """The sum of the bytes after `times` broadcasts; says "begun" before the last."""
        assert self._transport is not None
        data = torch.full((nbytes,), value, dtype=torch.uint8, device=self._device)
        if self._device == "cuda":
            torch.cuda.synchronize()
        for left in reversed(range(times)):
            if left == 0:
                self._say("begun")
            self._transport.start([Broadcast(data, root)]).wait()
        return int(data.sum(dtype=torch.int64))

    def stream(self, nbytes: int) -> int:
        """Broadcast, root after root, two pending, until an error; says "begun" when it flows."""
        assert self._transport is not None
        data = [torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        pending = [self._transport.start([Broadcast(each, 0)]) for each in data]
        for turn in range(1 << 30):
            pending.pop(0).wait()
            pending.append(self._transport.start([Broadcast(data[turn % 2], turn % 2)]))
            if turn == 10:
                self._say("begun")
        return 0

    def shuffle(self, case: str, rows: int, max_message_bytes: int, rank: int) -> dict[str, object]:
        from tests.shuffle_cases import shuffle_case

        assert self._transport is not None
        return shuffle_case(case, rows, max_message_bytes, rank, self._transport, self._device)

    def shuffle_on(self, case: str, rows: int, max_message_bytes: int, rank: int) -> None:
        from tests.shuffle_cases import shuffle_on

        assert self._transport is not None
        shuffle_on(case, rows, max_message_bytes, rank, self._transport, lambda: self._say("begun"))

    def close(self) -> float:
        started = time.monotonic()
        if self._transport:
            self._transport.close()
        self._transport = None
        return time.monotonic() - started

    def num_nccl_libraries(self) -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-1] for line in lines if "libnccl" in line})


def serve(pipe: Connection, name: str, devices: str) -> None:
    """Be a rank that sees `devices`, until the other end of `pipe` is closed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    rank = Rank(name, pipe.send)
    pipe.send("ready")
    while True:
        try:
            order, *args = pipe.recv()
        except EOFError:
            return
        started = time.monotonic()
        try:
            pipe.send({"value": getattr(rank, order)(*args)})
        except TransportError as error:
            pipe.send({"error": str(error), "seconds": time.monotonic() - started})


class Process:
    """One rank's process, and what it says."""

    def __init__(self, name: str, device: int) -> None:
        devices = str(device)
        # By the name of the device where one already restricts what this process sees.
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            devices = visible.split(",")[device] if name == "nccl" else visible
        context = forking() if name == "gloo" else multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, devices))
        self._process.start()
        theirs.close()

    def order(self, *order: object) -> None:
        self._pipe.send(order)

    def hear(self, timeout_s: float = READY_S) -> object:
        """The next thing that it says; "ended" when it is gone."""
        assert self._pipe.poll(timeout_s), f"nothing said within {timeout_s:g} s"
        try:
            return self._pipe.recv()
        except EOFError:
            return "ended"

    def value(self, timeout_s: float = READY_S) -> object:
        answer = self.hear(timeout_s)
        assert isinstance(answer, dict), answer
        assert "value" in answer, answer
        return answer["value"]

    def outcome(self, timeout_s: float) -> str:
        """The error that the last order ended with, if any."""
        answer = self.hear(timeout_s)
        assert isinstance(answer, dict), answer
        return str(answer.get("error", ""))

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Fleet:
    """Processes, of which some form a communicator: ranks are places in `members`."""

    def __init__(self, name: str, num_processes: int) -> None:
        self.processes = [Process(name, device) for device in range(num_processes)]
        for process in self.processes:
            assert process.hear() == "ready"
        self.members = list(self.processes)

    def open(self, timeout_s: float) -> None:
        """A new communicator of all members, in place of the one before."""
        for process in self.members:
            process.order("close")
        for process in self.members:
            process.value()
        self.members[0].order("offer")
        rendezvous = self.members[0].value()
        for rank, process in enumerate(self.members):
            process.order("open", rendezvous, rank, len(self.members), timeout_s)
        for process in self.members:
            process.value()

    def broadcast(self, nbytes: int = 1 << 20) -> None:
        """One from every rank, with the right bytes on every rank."""
        for root in range(len(self.members)):
            for rank, process in enumerate(self.members):
                process.order("broadcast", root, rank + 1, nbytes, 1)
            for process in self.members:
                assert process.hear() == "begun"
                assert process.value() == (root + 1) * nbytes

    def shuffle(self, case: str, rows: int, max_message_bytes: int) -> list[dict[str, object]]:
        """Every member's answer to its part of a case of `tests.shuffle_cases`."""
        for rank, process in enumerate(self.members):
            process.order("shuffle", case, rows, max_message_bytes, rank)
        answers = [process.value() for process in self.members]
        assert all(isinstance(answer, dict) for answer in answers)
        return answers  # type: ignore[return-value]

    def lose(self, rank: int) -> None:
        """Go on without `rank`."""
        self.members.pop(rank)

    def others(self, rank: int) -> Iterable[Process]:
        return [process for place, process in enumerate(self.members) if place != rank]

    def end(self) -> None:
        for process in self.processes:
            process.end()


def lose_one_outside(fleet: Fleet, rank: int, number: signal.Signals, timeout_s: float) -> None:
    """`rank` dies or hangs in front of a broadcast that the others are in: they name it and go on."""
    fleet.open(timeout_s)
    fleet.broadcast()
    num_ranks = len(fleet.members)
    for process in fleet.others(rank):
        process.order("broadcast", rank, 0, 1 << 24, 1)
        assert process.hear() == "begun"
    fleet.members[rank].signal(number)
    _survive(fleet, rank, num_ranks, timeout_s)


def lose_one_inside(fleet: Fleet, rank: int, number: signal.Signals, timeout_s: float) -> None:
    """`rank` dies or hangs while broadcasts flow: the others name it and go on."""
    fleet.open(timeout_s)
    num_ranks = len(fleet.members)
    for process in fleet.members:
        process.order("stream", 1 << 26)
    for process in fleet.members:
        assert process.hear() == "begun"
    fleet.members[rank].signal(number)
    _survive(fleet, rank, num_ranks, timeout_s)


def lose_one_that_passes_on(fleet: Fleet, rank: int, timeout_s: float) -> None:
    """`rank` is killed while messages flow, some through it: the others name it and go on."""
    fleet.open(timeout_s)
    num_ranks = len(fleet.members)
    for place, process in enumerate(fleet.members):
        process.order("shuffle_on", "copies", 4001, 64 << 10, place)
    for process in fleet.members:
        assert process.hear() == "begun"
    fleet.members[rank].signal(signal.SIGKILL)
    _survive(fleet, rank, num_ranks, timeout_s)


def _survive(fleet: Fleet, rank: int, num_ranks: int, timeout_s: float) -> None:
    started = time.monotonic()
    others = fleet.others(rank)
    errors = [process.outcome(2 * timeout_s + patient(20)) for process in others]
    print(f"after {time.monotonic() - started:.2f} s: {errors}")  # noqa: T201
    # Who is left by a rank that gave up first may take one broadcast for done: see `Pending.wait`.
    assert any(errors)
    assert all(f"rank {rank} of {num_ranks}" in error for error in errors if error)
    assert time.monotonic() - started < 2 * timeout_s + patient(10)
    fleet.lose(rank)
    fleet.open(timeout_s)
    fleet.broadcast()
