"""Tokens between processes of this host: the example, and a rank that is killed."""

from __future__ import annotations

import os
import runpy
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import forking
from tests.patience import patient
from weightsync.errors import PeerLostError
from weightsync.experts import ExpertGroup, SharedMemoryMover

EXAMPLE = Path(__file__).parents[2] / "examples/two_rank_experts.py"


def join(rank: int, num_ranks: int, folder: Path) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    return dist.new_group()


def train(pipe: Connection, rank: int, folder: Path, num_steps: int) -> None:
    world, example = join(rank, 2, folder), runpy.run_path(str(EXAMPLE))
    pipe.send([example["train"](world, ours, num_steps) for ours in (True, False)])


def lose_a_rank(pipe: Connection, rank: int, folder: Path, _: int) -> None:
    """Rank 1 is killed after one step."""
    mover = SharedMemoryMover(join(rank, 3, folder), timeout_s=patient(30))
    group = ExpertGroup(mover, 3, 1, 4, 2)
    given = torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([[0], [1]]), torch.ones(2, 1)
    rows, _, handle = group.dispatch(*given)
    assert torch.equal(group.combine(rows, handle), given[0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        group.dispatch(*given)
    pipe.send(str(caught.value))


def said(run: object, num_ranks: int, *args: object) -> list[object]:
    """What each rank's process says; None if it ends without a word."""
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = forking().Pipe(duplex=False)
        processes.append(forking().Process(target=run, args=(theirs, rank, *args)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found: list[object] = []
    for pipe in pipes:
        assert pipe.poll(patient(60))
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append(None)
    for process in processes:
        process.join(patient(60))
    return found


@pytest.mark.parametrize("num_steps", [15, pytest.param(200, marks=pytest.mark.faults)])
def test_two_ranks_learn_the_same_with_it_and_with_an_all_to_all(tmp_path: Path, num_steps: int) -> None:
    losses = said(train, 2, tmp_path, num_steps)
    for ours, theirs in losses:  # type: ignore[attr-defined]
        assert len(ours) == num_steps
        assert ours[-1] < 0.9 * ours[0]
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    first, killed, last = said(lose_a_rank, 3, tmp_path, 0)
    assert killed is None
    assert first == last == "rank 1 is gone: its process has ended, or closed its mover"
