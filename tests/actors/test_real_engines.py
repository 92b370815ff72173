"""Trainers and real engines over Ray: the engine's greedy tokens are those of the trainer's weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from safetensors.torch import load_file, save_file

from tests.fleets.actors import spawn
from tests.models import save_tokenizer
from tests.pages import run_block
from weightsync import ConfigError, PlanError, SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.recipes.config.recipe import LoopSpec, ModelSpec, MoeSpec, TrainerSpec
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.recipes.training.model import build_checkpoint
from weightsync.recipes.training.trainer import GrpoTrainer

PROMPTS = [
    torch.randint(3, 60, (4 + 3 * (i % 2),), generator=torch.Generator().manual_seed(i)).tolist()
    for i in range(8)
]
LOOP = LoopSpec(steps=100, epochs=1, group_size=4, prompts_per_step=2, learning_rate=0.005)
MODELS = {
    "dense": ModelSpec(hidden_size=64, intermediate_size=128, tie_word_embeddings=True),
    "moe": ModelSpec(hidden_size=64, moe=MoeSpec(num_experts=8, num_experts_per_tok=2, intermediate_size=32)),
}
VERSIONS = 3


def _groups(version: int) -> list[PromptGroup]:
    draw = torch.Generator().manual_seed(version)
    tokens = torch.randint(3, 60, (4, 3), generator=draw).tolist()
    return [PromptGroup(PROMPTS[version % 8], tokens, [1.0, 0.0, 0.0, 1.0])]


def sharpen(model: Path) -> None:
    """Give a checkpoint weights that tell prompts apart from the start."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "norm" not in name and "embed" not in name:
            tensor.mul_(12.0)
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("dense", "fsdp2"), id="dense"),
        pytest.param(("moe", "fsdp2"), id="moe", marks=pytest.mark.faults),
        pytest.param(("dense", "deepspeed"), id="deepspeed", marks=pytest.mark.faults),
        pytest.param(("dense", "megatron"), id="megatron", marks=pytest.mark.faults),
        pytest.param(("moe", "megatron"), id="megatron-moe", marks=pytest.mark.faults),
    ],
)
def trained(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory):
    shape, kind = request.param
    model = build_checkpoint(tmp_path_factory.mktemp("trained") / "model", MODELS[shape], seed=1)
    sharpen(model)
    save_tokenizer(model, [])
    spec = TrainerSpec(kind=kind, count=2)
    trainers = [spawn(GrpoTrainer, rank, spec, str(model), LOOP, str(rank), "cpu") for rank in range(2)]
    meeting = ray.get(trainers[0].listen.remote(None))
    ray.get([trainer.join.remote(*meeting) for trainer in trainers])
    yield model, trainers
    for trainer in trainers:
        ray.kill(trainer)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_engines_tokens_are_those_of_the_trainers_weights(trained) -> None:
    model, trainers = trained
    kinds = ["torch"] + (["vllm"] if importlib.util.find_spec("vllm") else [])
    engines = {kind: spawn(EngineActor, kind, str(model), kind, {}, str(i)) for i, kind in enumerate(kinds)}
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines(engines)
        sync.connect()
        seen = []
        for version in range(1, VERSIONS + 1):
            ray.get([trainer.train_step.remote(_groups(version)) for trainer in trainers])
            report = sync.update_weights(version)
            assert report.engines == dict.fromkeys(kinds, version)
            wanted = ray.get([trainer.greedy.remote(PROMPTS, 16) for trainer in trainers])[0]
            logprobs = []
            for kind in kinds:
                sampling = {"max_tokens": 16, "temperature": 0.0}
                rollout = ray.get(engines[kind].generate.remote(PROMPTS, sampling))
                assert rollout.tokens == wanted
                assert rollout.version == version
                logprobs.append(rollout.logprobs)
            for first, last in zip(logprobs[0], logprobs[-1], strict=True):
                assert first == pytest.approx(last, abs=1e-3)
            seen.append(wanted)
        eos = SimpleNamespace(eos_token_id=0)
        names = {"ray": ray, "engine": engines["torch"], "prompts": PROMPTS, "tokenizer": eos}
        rollout = run_block("docs/guide.md", 0, names, {"256": "16"})["rollout"]
        assert len(rollout.tokens) == len(rollout.logprobs) == 8 * len(PROMPTS)
        for engine in engines.values():
            assert_says_in_words(engine, wanted[0])
        assert seen[0] != seen[1] != seen[2]
        assert len({tuple(tokens) for tokens in seen[-1]}) == len(PROMPTS)
    for engine in engines.values():
        ray.get(engine.close.remote())
        ray.kill(engine)


def assert_says_in_words(engine: ActorHandle[Any], wanted: list[int]) -> None:
    """Ask with a text, and for twice the same completion up to a word."""
    words = [f"w{token}" for token in wanted]
    sampling = {"max_tokens": 16, "top_k": 1, "n": 2, "stop": words[5]}
    rollout = ray.get(engine.generate.remote([" ".join(f"w{token}" for token in PROMPTS[0])], sampling))
    until = words.index(words[5])
    assert rollout.tokens == [wanted[: until + 1]] * 2
    assert [text.split() for text in rollout.texts] == [words[:until]] * 2
    assert rollout.finish_reasons == ["stop"] * 2
    assert rollout.segments == [[(VERSIONS, until + 1)]] * 2
    with pytest.raises(ConfigError, match=r"sampling\.top_pp: 1 is not valid; .* did you mean 'top_p'"):
        ray.get(engine.generate.remote(PROMPTS, {"top_pp": 1}))


def test_a_checkpoint_of_another_shape_is_refused_by_the_tensors_name(trained, tmp_path: Path) -> None:
    _, trainers = trained
    other = build_checkpoint(tmp_path / "other", ModelSpec(hidden_size=96, intermediate_size=128), seed=1)
    engine = spawn(EngineActor, "torch", str(other), "e0", {}, "0")
    with WeightSync() as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        with pytest.raises(PlanError, match=r"embed_tokens|lm_head|experts|mlp"):
            sync.connect()
    ray.kill(engine)
