"""Two ranks of each backend over gloo, in processes of their own, against one rank on all the data."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.forked import fork, forking, import_deepspeed, import_megatron
from weightsync.memory.tensors import segment_view
from weightsync.plan.layout.experts import stack_experts
from weightsync.recipes.config.recipe import LoopSpec, ModelSpec, MoeSpec, TrainerSpec
from weightsync.recipes.training.backends import BACKENDS
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.recipes.training.learner import Learner
from weightsync.recipes.training.model import build_checkpoint
from weightsync.recipes.training.task import ProblemSampler, reward
from weightsync.sources.megatron import local_weights

LOOP = LoopSpec(steps=20, learning_rate=2e-3)
Result = tuple[list[dict[str, float]], bool, list[list[int]], dict[str, torch.Tensor]]
MODEL = ModelSpec(hidden_size=32, intermediate_size=48, num_hidden_layers=1)


def groups(num_groups: int) -> list[PromptGroup]:
    """Groups in which each completion is another digit, so that one in ten is right."""
    made = []
    for problem in ProblemSampler(3).sample(num_groups):
        completions = [[token] for token in range(2, 12)]
        made.append(PromptGroup(problem.prompt, completions, [reward(problem, done) for done in completions]))
    return made


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights, by the library's own gathering."""
    if learner.hf_config:
        return joined(learner)
    module = getattr(learner.model, "module", learner.model)
    if module is not learner.model:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    tensors = {name: weight.detach() for name, weight in module.state_dict().items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}


def joined(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights, by what each rank declares to hold of the checkpoint."""
    config = learner.hf_config
    held = local_weights(learner.model, config.model_type, vocab_size=config.vocab_size)
    layout = stack_experts(held.layout, held.num_experts)
    parts = [(each, segment_view(held.tensors[each.buffer], each).cpu().clone()) for each in layout.segments]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (layout.tensors, parts))
    found = {meta.name: torch.full(meta.shape, torch.nan) for metas, _ in ranks for meta in metas}
    for _, shares in ranks:
        for segment, part in shares:
            found[segment.tensor][segment.box.slices()] = part
    return found


def is_cut(learner: Learner) -> bool:
    weights = list(learner.model.parameters())
    if learner.hf_config:
        return sum(each.numel() for each in weights) < 0.6 * sum(
            each.numel() for each in joined(learner).values()
        )
    return all(isinstance(each, DTensor) or hasattr(each, "ds_tensor") for each in weights)


def learn(
    rank: int, world: int, folder: Path, num_steps: int, kind: str, loop: LoopSpec, device: str
) -> None:
    """What one rank does: trains on its share, then saves what it then knows."""
    torch.set_num_threads(1)
    os.environ["NCCL_HOSTID"] = str(rank)  # or NCCL refuses two ranks on one GPU
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/rendezvous {kind} {world}",
        rank=rank,
        world_size=world,
    )
    learner = Learner(folder / "model", loop, TrainerSpec(kind=kind), device)
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


def learn_all(world: int, *given: object) -> None:
    """Fork the ranks once there is what all of them import."""
    if "deepspeed" in given:
        import_deepspeed()
    if "megatron" in given:
        import_megatron()
    fork(world, learn, world, *given)


def results(
    folder: Path,
    world: int,
    num_steps: int,
    kind: str = "fsdp2",
    loop: LoopSpec = LOOP,
    device: str = "cpu",
) -> list[Result]:
    given = (world, folder, num_steps, kind, loop, device)
    if device == "cpu":
        ranks = [forking().Process(target=learn_all, args=given)]
    else:
        spawned = multiprocessing.get_context("spawn")
        ranks = [spawned.Process(target=learn, args=(rank, *given)) for rank in range(world)]
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
    if kind in ("deepspeed", "megatron") and not importlib.util.find_spec(kind):
        pytest.skip(f"needs {kind}")
    ranks = results(folder, world=2, num_steps=2, kind=kind)
    compare(ranks, alone)
    assert {result[1] for result in ranks} == {kind != "plain"}


def compare(ranks: list[Result], alone: Result) -> None:
    """Check that all ranks have the weights and the norms of the one that trained alone.

    Adam amplifies the smallest gradients, whose last bits differ between processors. One weight in a
    thousand may therefore be further off.
    """
    for name, weight in alone[3].items():
        close = torch.isclose(ranks[0][3][name], weight, rtol=1e-3, atol=1e-4)
        assert close.float().mean() >= 0.999, name
        assert_close(ranks[0][3][name], weight, rtol=1e-3, atol=1e-3)
        assert all(torch.equal(result[3][name], ranks[0][3][name]) for result in ranks)
    assert [step["grad_norm"] for step in ranks[0][0]] == pytest.approx(
        [step["grad_norm"] for step in alone[0]], rel=1e-3
    )


@pytest.mark.faults
def test_two_ranks_of_experts_learn_what_one_learns(tmp_path: Path) -> None:
    pytest.importorskip("megatron")
    moe = MoeSpec(num_experts=4, num_experts_per_tok=2, intermediate_size=32)
    build_checkpoint(tmp_path / "model", replace(MODEL, moe=moe), seed=0)
    compare_one_step(tmp_path)


def compare_one_step(folder: Path, device: str = "cpu") -> None:
    """Compare one step of two ranks of Megatron's with one rank's on the CPU.

    Not more: Adam makes much of the least gradients, such as a router's, and then other experts are chosen.
    """
    loop = replace(LOOP, epochs=1)
    (alone,) = results(folder, world=1, num_steps=1, loop=loop)
    ranks = results(folder, world=2, num_steps=1, kind="megatron", loop=loop, device=device)
    for name, weight in alone[3].items():
        assert torch.isclose(ranks[0][3][name], weight, rtol=1e-3, atol=1e-4).float().mean() > 0.95, name
        assert torch.equal(ranks[0][3][name], ranks[1][3][name])
    assert ranks[0][0][0]["grad_norm"] == pytest.approx(alone[0][0]["grad_norm"], rel=1e-3)


def test_training_finds_the_answers(folder: Path, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", MODEL, seed=0)
    (result,) = results(tmp_path, world=1, num_steps=12)
    right = [group.completions[group.rewards.index(1.0)] for group in groups(4)]
    assert result[2] == right


def learn_with_a_draft(rank: int, world: int, folder: Path) -> None:
    """What one rank of two does: trains, and saves how often its draft says what its model says."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    learner = Learner(folder / "model", LOOP, TrainerSpec(), "cpu", str(folder / "draft"))
    prompts = torch.tensor([problem.prompt for problem in ProblemSampler(5).sample(100)])

    def agreement() -> float:
        with torch.no_grad():
            answers = [each(prompts).logits[:, -1].argmax(-1) for each in (learner.model, learner.draft)]
        return (answers[0] == answers[1]).float().mean().item()

    before = agreement()
    for _ in range(6):
        learner.train_step(groups(16)[rank::world])
    torch.save((before, agreement()), folder / f"agreement {rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_a_draft_learns_to_say_what_its_model_says(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", replace(MODEL, num_hidden_layers=2), seed=0)
    build_checkpoint(tmp_path / "draft", MODEL, seed=1)
    process = forking().Process(target=fork, args=(2, learn_with_a_draft, 2, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    before, after = torch.load(tmp_path / "agreement 0.pt")
    assert before < 0.2
    assert after > 0.5
