"""Megatron-Core's ranks as actors, and contradictions between ranks, which connect() refuses and names."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.contract.megatron_ranks import Case
from tests.fleets.actors import spawn
from tests.fleets.megatron_trainer import MegatronTrainer
from tests.fleets.staged import Given, Staged, TwoLayers
from tests.models import build_tiny_qwen3, greedy
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync
from weightsync.errors import ConfigError, PlanError, WeightSyncError

PROMPTS = [[5, 17, 102], [64, 9], [33, 200, 7, 31]]
KIND = "vllm" if importlib.util.find_spec("vllm") else "torch"


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize(
    "case",
    [Case("dense", "qwen3", tp=2), Case("experts", "qwen3_moe", ep=2)],
    ids=["dense-tp-2", "experts-ep-2"],
)
def test_an_engine_answers_as_the_checkpoint_that_megatron_holds(
    case: Case, cluster: None, tmp_path: Path
) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    models = [build_tiny_qwen3(path, moe=case.ep > 1, seed=seed) for seed, path in enumerate(paths)]
    meeting, path = str(tmp_path / "meeting"), str(paths[0])
    trainers = [spawn(MegatronTrainer, rank, case, meeting, path) for rank in range(2)]
    engine = spawn(EngineActor, KIND, path, "e0", {}, "0")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, (path, model) in enumerate(zip(map(str, paths), models, strict=True), start=1):
            ray.get([trainer.load.remote(path) for trainer in trainers])
            assert sync.update_weights(version).engines == {"e0": version}
            rollout = ray.get(engine.generate.remote(PROMPTS, {"max_tokens": 16, "temperature": 0.0}))
            assert rollout.tokens == greedy(model, PROMPTS)
    ray.get(engine.close.remote())
    for trainer in trainers:
        ray.kill(trainer)


FIRST, SECOND = Given(), Given(stage=1, first_layer=1)


def with_settings(given: Given, **settings: Any) -> Given:
    return replace(given, settings=settings)


WRONG: dict[str, tuple[tuple[Given, Given], type[WeightSyncError], str]] = {
    "stages that overlap": (
        (FIRST, replace(SECOND, first_layer=0, num_layers=2)),
        PlanError,
        r"^model\.layers\.0\.input_layernorm\.weight: rank 0 of pipeline stage 0 and rank 1 of stage 1 both "
        "hold it; give each stage layers of its own",
    ),
    "a pattern of no rank": (
        (with_settings(FIRST, exclude=["valeu_head.*"]), with_settings(SECOND, exclude=["valeu_head.*"])),
        ConfigError,
        r"^exclude: 'valeu_head\.\*' is not valid; it matches no name of any rank; .*"
        r"valid: model\.embed_tokens\.weight, model\.layers\.0\.",
    ),
    "a prefix of no rank": (
        (with_settings(FIRST, names={"modle.": ""}), with_settings(SECOND, names={"modle.": ""})),
        ConfigError,
        r"^names: 'modle\.' is not valid; it matches no name of any rank; .*model\.layers\.1\.input",
    ),
    "replicas of two dtypes": (
        (replace(FIRST, num_layers=2), Given(num_layers=2, dtype="bfloat16")),
        PlanError,
        r"rank 0 says float32 \(8,\), rank 1 says bfloat16 \(8,\)",
    ),
    "replicas of two shapes": (
        (replace(FIRST, num_layers=2), Given(num_layers=2, width=4)),
        PlanError,
        r"^model\.layers\.0\.input_layernorm\.weight: rank 0 says float32 \(8,\), rank 1 says float32 \(4,\)",
    ),
    "a padded vocabulary that the engine does not know": (
        (replace(FIRST, vocab_size=16), replace(SECOND, vocab_size=16)),
        PlanError,
        r"^model\.embed_tokens\.weight: shape \(16, 8\) at the source, \(11, 8\) at the engine; .*vocab_size",
    ),
    "more tokens than Megatron has rows": (
        (replace(FIRST, vocab_size=17), replace(SECOND, vocab_size=17)),
        ConfigError,
        r"vocab_size: 17 .*embedding\.word_embeddings\.weight has 16 rows over 1 ranks",
    ),
}


@pytest.fixture(scope="module")
def sync(cluster: None) -> Iterator[WeightSync]:
    trainers, engine = [spawn(Staged, f"t{rank}") for rank in range(2)], spawn(TwoLayers, "e0", "e")
    with WeightSync(SyncConfig(timeout_s=patient(60))) as made:
        made.register_trainers(trainers)
        made.register_engines({"e0": engine})
        yield made
    for actor in (*trainers, engine):
        ray.kill(actor)


def say(sync: WeightSync, *given: Given) -> None:
    ray.get([trainer.say.remote(each) for trainer, each in zip(sync.trainers(), given, strict=True)])


@pytest.mark.parametrize("what", WRONG)
def test_what_ranks_say_that_cannot_be_is_refused(sync: WeightSync, what: str) -> None:
    given, error, message = WRONG[what]
    say(sync, *given)
    with pytest.raises(error, match=message):
        sync.connect()


def test_a_family_without_rules_is_refused_with_the_page_that_says_how_to_add_one(sync: WeightSync) -> None:
    ray.get([each.say_as_model.remote(replace(FIRST, family="gpt_oss")) for each in sync.trainers()])
    with pytest.raises(ConfigError, match=r"^family: 'gpt_oss' .*as docs/trainers\.md shows"):
        sync.connect()


def test_stages_of_their_own_layers_are_served_and_settings_that_one_rank_knows_count(
    sync: WeightSync,
) -> None:
    renamed = {"model.embed_tokens.": "model.embed_tokens.", "model.layers.1.": "model.layers.1."}
    settings = {"names": renamed, "exclude": ["decoder.layers.1.*"]}  # each fits the names of one stage alone
    say(sync, *(with_settings(each, **settings) for each in (FIRST, replace(SECOND, num_layers=2))))
    sync.connect()
    assert sync.update_weights(1).verified
    assert ray.get(sync.engines()["e0"].means.remote()) == [1.0, 1.0, 2.0]
