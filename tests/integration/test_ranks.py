"""Processes of ranks that die, are stopped, or outlive their engine: real ones, with no engine in them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import patient
from weightsync.engines.rank.rank_process import RankProcess, RankWatch
from weightsync.errors import RankLostError

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys
from weightsync.engines.rank.rank_process import RankProcess
print(RankProcess.join(0, {engine}), os.getpid(), flush=True)
sys.stdin.read()
"""
ENGINE = f"""
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}.format(engine=os.getpid())], stdin=subprocess.PIPE)
sys.stdin.read()
"""
TIMEOUT_S = patient(20)


def until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not (now := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def start(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def ranks() -> Iterator[list[RankProcess]]:
    processes = [start(RANK.format(engine=os.getpid())) for _ in range(3)]
    joined = [eval(line(process).rpartition(" ")[0]) for process in processes]
    yield [RankProcess(number, rank.pid, rank.identity) for number, rank in enumerate(joined)]
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def lost(ranks: list[RankProcess]) -> Iterator[queue.SimpleQueue[RankLostError]]:
    heard: queue.SimpleQueue[RankLostError] = queue.SimpleQueue()
    watch = RankWatch("e0", ranks, heard.put)
    yield heard
    watch.close()


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGKILL, "ended"), (signal.SIGTERM, "ended"), (signal.SIGSTOP, "is stopped")]
)
def test_the_rank_that_is_lost_is_told_by_its_number_once(ranks, lost, number: int, what: str) -> None:
    os.kill(ranks[1].pid, number)
    error = lost.get(timeout=TIMEOUT_S)
    assert (error.engine, error.rank) == ("e0", 1)
    assert error.cause == f"its process {ranks[1].pid} {what}"
    os.kill(ranks[2].pid, signal.SIGKILL)
    assert until(lambda: not ranks[2].state())
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)


def test_a_rank_that_is_stopped_for_a_moment_is_not_lost(ranks, lost) -> None:
    os.kill(ranks[0].pid, signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)
    os.kill(ranks[0].pid, signal.SIGCONT)
    os.kill(ranks[2].pid, signal.SIGKILL)
    assert lost.get(timeout=TIMEOUT_S).rank == 2


def test_ranks_are_ended_also_while_they_are_stopped(ranks) -> None:
    heard: queue.SimpleQueue[RankLostError] = queue.SimpleQueue()
    watch = RankWatch("e0", ranks, heard.put)
    os.kill(ranks[0].pid, signal.SIGSTOP)
    watch.close()
    watch.end()
    assert until(lambda: not any(rank.state() for rank in ranks))
    watch.end()
    assert heard.empty()


def test_a_later_process_of_the_same_number_is_another(ranks) -> None:
    later = RankProcess(0, ranks[0].pid, 1)
    assert later.state() == ""
    later.end()
    assert ranks[0].state() in ("sleeping", "running")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGCONT])
def test_a_rank_ends_with_its_engine_whatever_it_does(number: int) -> None:
    engine = start(ENGINE)
    text, _, pid = line(engine).rpartition(" ")
    rank = eval(text)
    assert rank == RankProcess(0, int(pid), rank.identity)
    os.kill(rank.pid, number)
    engine.kill()
    engine.communicate()
    assert until(lambda: not rank.state())


def test_who_lives_in_the_engines_process_or_was_started_by_another_is_not_watched() -> None:
    assert RankProcess.join(0, os.getpid()) is None
    assert RankProcess.join(0, 1 << 22) is None
