"""Two FSDP2 ranks over gloo, in processes of their own, against one rank on all the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.forked import forking
from weightsync.recipes.grpo import Group
from weightsync.recipes.learner import Learner
from weightsync.recipes.model import build_checkpoint
from weightsync.recipes.recipe import LoopSpec, ModelSpec
from weightsync.recipes.task import ProblemSampler, reward

LOOP = LoopSpec(steps=20, learning_rate=2e-3)
Result = tuple[list[dict[str, float]], bool, list[list[int]], dict[str, torch.Tensor]]
MODEL = ModelSpec(hidden_size=32, intermediate_size=48, num_hidden_layers=1)


def groups(num_groups: int) -> list[Group]:
    """Groups in which each completion is another digit, so that one in ten is right."""
    made = []
    for problem in ProblemSampler(3).sample(num_groups):
        completions = [[token] for token in range(2, 12)]
        made.append(Group(problem.prompt, completions, [reward(problem, done) for done in completions]))
    return made


def learn(rank: int, world: int, folder: Path, num_steps: int) -> None:
    """What one rank does: trains on its share, then saves what it then knows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world
    )
    learner = Learner(folder / "model", LOOP)
    mine = groups(16)[rank::world]
    metrics = [learner.train_step(mine) for _ in range(num_steps)]
    sharded = all(isinstance(weight, DTensor) for weight in learner.model.parameters())
    answers = learner.greedy([group.prompt for group in groups(4)], 1)
    weights = {name: weight.full_tensor().clone() for name, weight in learner.model.state_dict().items()}
    torch.save((metrics, sharded, answers, weights), folder / f"result{world}-{rank}.pt")
    learner.scramble()
    for name, weight in learner.model.state_dict().items():
        assert not torch.eq(weight.full_tensor(), weights[name]).any(), name
    dist.destroy_process_group()


def results(folder: Path, world: int, num_steps: int) -> list[Result]:
    context = forking()
    ranks = [context.Process(target=learn, args=(rank, world, folder, num_steps)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    return [torch.load(folder / f"result{world}-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    build_checkpoint(folder / "model", MODEL, seed=0)
    return folder


def test_two_shards_learn_what_one_learns(folder: Path) -> None:
    first, second = results(folder, world=2, num_steps=2)
    (alone,) = results(folder, world=1, num_steps=2)
    assert first[1]
    assert second[1]
    for name, weight in alone[3].items():
        assert_close(first[3][name], weight, rtol=1e-3, atol=1e-4)
        assert torch.equal(first[3][name], second[3][name])
    assert [step["grad_norm"] for step in first[0]] == pytest.approx(
        [step["grad_norm"] for step in alone[0]], rel=1e-3
    )


def test_training_finds_the_answers(folder: Path, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", MODEL, seed=0)
    (result,) = results(tmp_path, world=1, num_steps=12)
    right = [group.completions[group.rewards.index(1.0)] for group in groups(4)]
    assert result[2] == right
