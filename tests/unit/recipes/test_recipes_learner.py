"""Two ranks of each backend over gloo, in processes of their own, against one rank on all the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.forked import forking
from weightsync.recipes.backends import BACKENDS
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


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights, by the library's own gathering."""
    module = getattr(learner.model, "module", learner.model)
    if module is not learner.model:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    tensors = {name: weight.detach() for name, weight in module.state_dict().items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}


def is_cut(learner: Learner) -> bool:
    weights = list(learner.model.parameters())
    return all(isinstance(each, DTensor) or hasattr(each, "ds_tensor") for each in weights)


def learn(rank: int, world: int, folder: Path, num_steps: int, kind: str) -> None:
    """What one rank does: trains on its share, then saves what it then knows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous {kind} {world}", rank=rank, world_size=world
    )
    learner = Learner(folder / "model", LOOP, kind=kind)
    mine = groups(16)[rank::world]
    metrics = [learner.train_step(mine) for _ in range(num_steps)]
    answers = learner.greedy([group.prompt for group in groups(4)], 1)
    weights = whole(learner)
    torch.save((metrics, is_cut(learner), answers, weights), folder / f"{kind} {world} {rank}.pt")
    learner.scramble()
    scrambled = whole(learner)
    for name, weight in scrambled.items():
        assert not torch.eq(weight, weights[name]).any(), name
    dist.barrier()
    dist.destroy_process_group()


def results(folder: Path, world: int, num_steps: int, kind: str = "fsdp2") -> list[Result]:
    context = forking()
    ranks = [
        context.Process(target=learn, args=(rank, world, folder, num_steps, kind)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    return [torch.load(folder / f"{kind} {world} {rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    build_checkpoint(folder / "model", MODEL, seed=0)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Result:
    """One rank on all the data."""
    (found,) = results(folder, world=1, num_steps=2)
    return found


@pytest.mark.parametrize("kind", BACKENDS)
def test_two_ranks_learn_what_one_learns(folder: Path, alone: Result, kind: str) -> None:
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    first, second = results(folder, world=2, num_steps=2, kind=kind)
    assert first[1] == second[1] == (kind != "plain")
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
