"""Processes that are ranks with a `CudaMover`. Each runs functions of this module by name."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.expert_cases import CASES, LARGE, Case, assert_same, expected, group_of, layer
from tests.patience import patient
from weightsync.errors import DeadlineError, StateError
from weightsync.experts import CudaMover

NUM_REPLAYS = 50
NUM_STEPS = 40


class Ranks:
    """The processes of all ranks, on as many GPUs as there are."""

    def __init__(self, num_ranks: int, path: Path, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, num_ranks, str(path), theirs, settings), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for each in self.processes:
            each.start()

    def run(self, name: str, *args: object, on: tuple[int, ...] | None = None) -> list[Any]:
        """Run a function on all ranks, or on some. Raises AssertionError with the traces of errors."""
        ends = [end for rank, end in enumerate(self._ends) if on is None or rank in on]
        for end in ends:
            end.send((name, args))
        answers = []
        for end in ends:
            assert end.poll(patient(60)), f"{name}: a rank does not answer"
            answers.append(end.recv())
        problems = [trace for trace, _ in answers if trace]
        assert not problems, "\n".join(problems)
        return [value for _, value in answers]

    def end(self) -> None:
        """Kill all."""
        for each in self.processes:
            each.kill()
            each.join()


@contextmanager
def ranks(num_ranks: int, path: Path, **settings: Any) -> Iterator[Ranks]:
    """Yield ranks that end afterwards."""
    started = Ranks(num_ranks, path, **settings)
    try:
        yield started
    finally:
        started.end()


def _serve(rank: int, num_ranks: int, path: str, end: Connection, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", f"file://{path}", timedelta(seconds=patient(60)), num_ranks, rank)
    assert dist.group.WORLD is not None
    mover = CudaMover(dist.group.WORLD, **settings)
    while True:
        name, args = end.recv()
        try:
            answer = "", globals()[name](mover, *args)
        except BaseException:  # noqa: BLE001  # the parent shows it
            answer = f"rank {rank}: {traceback.format_exc()}", None
        end.send(answer)


def matches_the_cpu(mover: CudaMover, name: str) -> None:
    """Compare a case's rows, plan, sums and gradients."""
    case = LARGE if name == "large" else CASES[name]
    tokens = case.tokens(mover.num_ranks)
    assert_same(layer(mover, tokens, **case.settings), expected(tokens, **case.settings)[mover.rank])


def replays_a_graph(mover: CudaMover, fp8: bool) -> None:
    """Capture a layer, and replay it with other tokens, ids and weights each time."""
    case = Case(
        hidden=256, num_tokens=(12, 12, 12, 12), settings={"check": False, "alignment": 4, "fp8": fp8}
    )
    tokens = case.tokens(mover.num_ranks)
    group = group_of(mover, tokens, **case.settings)
    x, ids, weights = (each[mover.rank].cuda() for each in (tokens.x, tokens.ids, tokens.weights))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        rows, counts, handle = group.dispatch(x, ids, weights)
        plain = rows.dequantised().bfloat16() if fp8 else rows
        return group.combine(plain, handle), counts

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, counts = call()
    for seed in range(1, NUM_REPLAYS + 1):
        tokens = case.tokens(mover.num_ranks, seed)
        for static, new in zip((x, ids, weights), (tokens.x, tokens.ids, tokens.weights), strict=True):
            static.copy_(new[mover.rank])
        graph.replay()
        chosen = torch.where(tokens.ids[mover.rank] >= 0, tokens.weights[mover.rank], 0).sum(1, keepdim=True)
        found, wanted = out.cpu(), tokens.x[mover.rank].float() * chosen
        mover.check()
        tolerance = 0.1 if fp8 else 0.02
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)
        mine = torch.cat([each.flatten() for each in tokens.ids])
        assert counts.tolist() == [
            int((mine == mover.rank * case.num_local + local).sum()) for local in range(case.num_local)
        ]


def refuses_to_grow_in_a_capture(mover: CudaMover) -> None:
    tokens = LARGE.tokens(mover.num_ranks)
    layer(mover, tokens)  # loads kernels
    tokens.x[:] = [each.repeat(1, 8) for each in tokens.x]
    group = group_of(mover, tokens, check=False)
    x, ids, weights = (each[mover.rank].cuda() for each in (tokens.x, tokens.ids, tokens.weights))
    problem = "make a call of this size before the capture"
    with pytest.raises(StateError, match=problem), torch.cuda.graph(torch.cuda.CUDAGraph()):
        group.dispatch(x, ids, weights)


def pauses_between_steps(mover: CudaMover) -> None:
    """Run steps with pauses of random length before and between calls."""
    draw, case = random.Random(mover.rank), Case()
    steps = [case.tokens(mover.num_ranks, seed) for seed in range(4)]
    group = group_of(mover, steps[0])
    for number in range(NUM_STEPS):
        tokens = steps[number % 4]
        x, ids, weights = (each[mover.rank] for each in (tokens.x, tokens.ids, tokens.weights))
        time.sleep(draw.choice([0, 0, 1e-4, 2e-3]))
        rows, _, handle = group.dispatch(x.cuda(), ids.cuda(), weights.cuda())
        time.sleep(draw.choice([0, 0, 1e-4, 2e-3]))
        back = group.combine(rows, handle).cpu()
        wanted = x.float() * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(back.float(), wanted, rtol=0.02, atol=0.02)


def misses(mover: CudaMover, check: bool) -> tuple[tuple[str, ...], float]:
    """Dispatch without a rank. Returns the missing ranks, and the seconds until the error."""
    tokens = Case().tokens(mover.num_ranks)
    x, ids, weights = (each[mover.rank].cuda() for each in (tokens.x, tokens.ids, tokens.weights))
    group = _made[check]
    begun = time.monotonic()
    try:
        group.dispatch(x, ids, weights)
        torch.cuda.synchronize()
        mover.check()
    except DeadlineError as error:
        return error.missing, time.monotonic() - begun
    raise AssertionError("no error")


def makes_groups(mover: CudaMover) -> None:
    """Make groups with and without checks, and use them once."""
    tokens = Case().tokens(mover.num_ranks)
    x, ids, weights = (each[mover.rank].cuda() for each in (tokens.x, tokens.ids, tokens.weights))
    for check in (True, False):
        _made[check] = group_of(mover, tokens, check=check)
        _made[check].dispatch(x, ids, weights)
    torch.cuda.synchronize()


_made = dict[bool, Any]()


def closes(mover: CudaMover) -> None:
    mover.close()
    mover.close()
