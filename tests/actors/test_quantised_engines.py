"""bf16 trainers and a real vLLM in four bits, which answers as one that starts from a packed checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
from safetensors.torch import load_file

from tests.contract.test_vllm_quantized import Served, needs_kernel
from tests.fleets.actors import spawn, until
from tests.fleets.bf16_trainer import Bf16Trainer
from tests.fleets.faulty import pid
from tests.fleets.flipped_engine import FlippedEngine
from tests.models import build_tiny_qwen3
from tests.pages import run_block
from tests.patience import patient
from tests.quantised import CONFIGS, INT4, save_quantised
from weightsync import EngineActor, SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PlanError, VerifyError, WeightSyncError

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(400),
    needs_kernel,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

Checkpoints = list[tuple[Path, dict[str, list[int]]]]
"""Checkpoints, each with what vLLMs answer that start from it in each of `CONFIGS`."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder, found = tmp_path_factory.mktemp("checkpoints"), []
    for seed in range(2):
        path, answers = folder / str(seed), {}
        build_tiny_qwen3(path, seed=seed)
        for kind, config in CONFIGS.items():
            save_quantised(path, packed := folder / f"{seed}-{kind}", config)
            served = Served(packed, "auto")
            answers[kind] = served.says()
            served.close()
        found.append((path, answers))
    for kind in CONFIGS:
        assert found[0][1][kind] != found[1][1][kind]
    return found


@pytest.fixture(scope="module")
def trainers(cluster: None, checkpoints: Checkpoints, tmp_path_factory) -> Iterator[list[Any]]:
    arguments = (2, str(tmp_path_factory.mktemp("trainers") / "meeting"), str(checkpoints[0][0]))
    actors = [spawn(Bf16Trainer, rank, *arguments) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def start(checkpoints: Checkpoints) -> Callable[[str], Any]:
    """As docs/quantised.md starts an engine."""
    names = run_block("docs/quantised.md", 0)
    assert names["INT4"] == INT4

    def start_engine(kind: str) -> Any:
        names["INT4"] = CONFIGS[kind]
        return names["start_engine"](str(checkpoints[0][0]), num_gpus=0)

    return start_engine


def says(engine: Any) -> list[int]:
    rollout = ray.get(engine.generate.remote([[5, 6, 7]], {"max_tokens": 16, "temperature": 0.0}))
    return rollout.tokens[0]


def train(trainers: list[Any], path: Path) -> None:
    ray.get([trainer.load.remote(str(path)) for trainer in trainers])


def end(*engines: Any) -> None:
    ray.get([engine.close.remote() for engine in engines])
    for engine in engines:
        ray.kill(engine)


@pytest.mark.parametrize(
    "said",
    [
        {
            "int4": "int4 with a scale for 1 x 32",
            "zero points": "int4 with a scale and a zero point for 1 x 32",
        },
        {
            "awq": "int4 (AWQ) with a scale and a zero point for 1 x 32",
            "gptq": "int4 (GPTQ) with a scale for 1 x 32",
        },
    ],
    ids=" and ".join,
)
def test_engines_of_two_formats_and_of_bf16_take_every_version_together(
    said: dict[str, str], trainers: list[Any], checkpoints: Checkpoints, start: Callable[[str], Any]
) -> None:
    quantised = {kind: start(kind) for kind in said}
    bf16 = spawn(EngineActor, "torch", str(checkpoints[0][0]), "bf16", {"dtype": "bfloat16"}, "1")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({**quantised, "bf16": bf16})
        sync.connect()
        for version, (path, answers) in enumerate([*checkpoints, checkpoints[0]], start=1):
            train(trainers, path)
            report = sync.update_weights(version)
            assert report.engines == dict.fromkeys([*said, "bf16"], version)
            for kind, form in said.items():
                assert report.routes[kind] == f"it takes whole tensors, of which 14 become {form}"
                assert report.proofs[kind] == "what its loader got; no engine is alike"
                assert says(quantised[kind]) == answers[kind]
            assert report.proofs["bf16"] == "live weights"
    end(*quantised.values(), bf16)


def test_a_bit_that_flips_in_packed_weights_serves_nowhere(
    trainers: list[Any], checkpoints: Checkpoints
) -> None:
    options = {"dtype": "bfloat16", "hf_overrides": {"quantization_config": INT4}}
    engines = {
        name: spawn(FlippedEngine, "vllm", str(checkpoints[0][0]), name, options) for name in ("a", "b")
    }
    with WeightSync(SyncConfig(bucket_bytes=64 << 10, heal_attempts=0)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines(engines)
        sync.connect()
        train(trainers, checkpoints[0][0])
        assert sync.update_weights(1).verified
        ray.get(engines["b"].flip.remote(2))
        train(trainers, checkpoints[1][0])
        with pytest.raises(
            VerifyError, match=r"live parameters of rank 0, which engines alike have otherwise"
        ):
            sync.update_weights(2)
        assert set(sync.engine_states().values()) == {EngineState.STALE}, "nobody knows which one is right"
        train(trainers, checkpoints[0][0])
        with pytest.raises(VerifyError, match="engine"):
            sync.update_weights(3)
        train(trainers, checkpoints[1][0])  # equal tensors have to make the flipped bytes again
        report = sync.update_weights(4)
        assert report.engines == {"a": 4, "b": 4}
        assert set(report.proofs.values()) == {"what its loader got, and live weights with 1 engine alike"}
        ray.get(engines["b"].flip.remote(1))
        with pytest.raises(WeightSyncError, match=r"engine b, .* other live bytes of the same tensors"):
            sync.heal("b")
        assert sync.engine_states() == {"a": EngineState.SERVING, "b": EngineState.STALE}
        sync.heal("b")
        assert {says(engine)[0] for engine in engines.values()} == {checkpoints[1][1]["int4"][0]}
    end(*engines.values())


@pytest.mark.parametrize(
    ("kind", "stage"), [("int4", "none"), ("int4", "host"), ("awq", "none"), ("gptq", "host")]
)
def test_a_killed_engine_is_filled_again_from_snapshots_and_then_from_files(
    kind: str,
    stage: Literal["none", "host"],
    trainers: list[Any],
    checkpoints: Checkpoints,
    start: Callable[[str], Any],
) -> None:
    started = [start(kind)]

    def respawn(_: str) -> Any:
        started.append(start(kind))
        return started[-1]

    config = SyncConfig(bucket_bytes=64 << 10, respawn_timeout_s=patient(60), stage=stage)
    with WeightSync(config) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({kind: started[0]}, respawn=respawn)
        sync.connect()
        for version, (path, _) in enumerate(checkpoints, start=1):
            train(trainers, path)
            sync.update_weights(version)
        os.kill(pid(started[0]), signal.SIGKILL)
        train(trainers, checkpoints[0][0])  # what is not published yet must not be read
        assert until(lambda: len(started) > 1, patient(30))
        sync.settle(patient(90))
        assert sync.engine_states() == {kind: EngineState.SERVING}
        assert says(started[1]) == checkpoints[1][1][kind]
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_engines({kind: started[1]})
        sync.register_checkpoint("first", [str(checkpoints[0][0])])
        sync.connect()
        assert sync.update_weights(checkpoint="first").verified
        assert says(started[1]) == checkpoints[0][1][kind]
    end(started[1])


@pytest.mark.parametrize("kind", ["int4", "awq", "gptq"])
def test_checkpoints_that_are_quantised_alike_are_served_as_they_are_stored(
    kind: str, trainers: list[Any], checkpoints: Checkpoints, start: Callable[[str], Any]
) -> None:
    """In place of trainers, and before them. An engine that is killed in between is filled with the same."""
    started = [start(kind)]

    def respawn(_: str) -> Any:
        started.append(start(kind))
        return started[-1]

    config = SyncConfig(bucket_bytes=64 << 10, respawn_timeout_s=patient(60))
    with WeightSync(config) as sync:
        sync.register_engines({kind: started[0]}, respawn=respawn)
        for path, _ in checkpoints:
            sync.register_checkpoint(path.name, [str(path.with_name(f"{path.name}-{kind}"))], stored=True)
        sync.connect()
        for path, answers in [*checkpoints, checkpoints[0]]:
            report = sync.update_weights(checkpoint=path.name)
            assert report.routes == {kind: "it takes whole tensors, of which none is converted"}
            assert report.proofs == {kind: "what its loader got; no engine is alike"}
            assert says(started[-1]) == answers[kind]
        os.kill(pid(started[0]), signal.SIGKILL)
        assert until(lambda: len(started) > 1, patient(30))
        sync.settle(patient(90))
        assert says(started[1]) == checkpoints[0][1][kind]
        train(trainers, checkpoints[1][0])
        sync.register_trainers(trainers)
        sync.connect()
        report = sync.update_weights()
        assert report.routes[kind].startswith("it takes whole tensors, of which 14 become int4 ")
        assert says(started[1]) == checkpoints[1][1][kind]
    end(started[1])


def test_a_checkpoint_in_another_format_than_the_engine_does_not_connect(
    cluster: None, checkpoints: Checkpoints, start: Callable[[str], Any]
) -> None:
    engine = start("int4")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_engines({"int4": engine})
        sync.register_checkpoint("other", [str(checkpoints[0][0].with_name("0-zero points"))], stored=True)
        with pytest.raises(PlanError, match="weight_zero_point"):
            sync.connect()
    end(engine)


def test_trainers_that_quantise_send_a_third_and_engines_answer_alike(
    cluster: None, checkpoints: Checkpoints, start: Callable[[str], Any], tmp_path: Path
) -> None:
    """Two FSDP2 ranks hold halves of each matrix."""
    arguments = (2, str(tmp_path / "meeting"), str(checkpoints[0][0]), INT4)
    trainers = [spawn(Bf16Trainer, rank, *arguments) for rank in range(2)]
    engine = start("int4")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"int4": engine})
        sync.connect()
        for version, (path, answers) in enumerate([*checkpoints, checkpoints[0]], start=1):
            train(trainers, path)
            report = sync.update_weights(version)
            assert report.routes == {"int4": "it takes whole tensors, of which none is converted"}
            assert says(engine) == answers["int4"]
        full = sum(each.nbytes for each in load_file(checkpoints[0][0] / "model.safetensors").values())
        assert report.nbytes < full / 2
    end(engine)
    for trainer in trainers:
        ray.kill(trainer)
