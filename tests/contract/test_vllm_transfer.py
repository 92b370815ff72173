"""The backend in vLLM's own weight transfer, found by its entry point."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from tests.contract.test_vllm_nan import NUMBERS, PROMPTS, Vllm, save
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync.errors import ConfigError
from weightsync.plugins import register_vllm
from weightsync.plugins.sender import Sender

ROOT = Path(__file__).parents[2]

with_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")


def test_without_vllm_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    register_vllm()


@with_vllm
def test_its_factories_know_the_backend_however_often_it_is_told() -> None:
    from vllm.distributed.weight_transfer import base, factory

    register_vllm()
    register_vllm()
    factories = (factory.WeightTransferEngineFactory, base.WeightTransferEngine)
    trainers = (factory.WeightTransferTrainerFactory, base.TrainerWeightTransferEngine)
    for known, kind in (factories, trainers):
        made = known._registry["weightsync"]()
        assert issubclass(made, kind)
        assert not made.__abstractmethods__


@with_vllm
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_trainer_pushes_weights_into_vllm(tmp_path: Path) -> None:
    egg_info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(egg_info, cwd=ROOT, check=True, capture_output=True)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.vllm_transfer", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=patient(280),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Failed to load weights" not in done.stderr + done.stdout


@with_vllm
def test_a_worker_with_a_draft_refuses_to_join() -> None:
    from weightsync.plugins.vllm import WeightSyncInitInfo, WeightSyncTransferEngine

    speculative = SimpleNamespace(method="eagle", model="a/draft")
    config = SimpleNamespace(speculative_config=speculative, parallel_config=None, model_config=None)
    engine = WeightSyncTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"speculative_config: .*eagle.*leave it out"):
        engine.init_transfer_engine(WeightSyncInitInfo("", 2))


@with_vllm
def test_a_worker_beyond_the_world_refuses_to_join() -> None:
    from weightsync.plugins.vllm import WeightSyncInitInfo, WeightSyncTransferEngine

    parallel = SimpleNamespace(data_parallel_index=1, world_size=2, rank=0)
    config = SimpleNamespace(speculative_config=None, parallel_config=parallel, model_config=None)
    engine = WeightSyncTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"world_size: 3 is not valid; .*workers plus 1: this is rank 3"):
        engine.init_transfer_engine(WeightSyncInitInfo("", 3))


@with_vllm
def test_a_trainer_hears_at_once_that_vllm_refuses() -> None:
    from weightsync.plugins.vllm_trainer import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo

    def refuse(init_info: dict[str, object]) -> None:
        raise ConfigError("model", "x", "leave it out")

    info = WeightSyncTrainerInitInfo("127.0.0.1", 2, "gloo", timeout_s=patient(600), rank=0)
    client = SimpleNamespace(init_weight_transfer_engine=refuse)
    with pytest.raises(ConfigError, match="leave it out"):
        WeightSyncTrainerEngine.trainer_init(info, client=client, source=_Source33())


@with_vllm
@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_vllm_removes_adapters_in_its_own_transfer_and_reads_their_files_again(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    register_vllm()
    from vllm.config import WeightTransferConfig

    vllm = Vllm(tmp_path, 2, weight_transfer_config=WeightTransferConfig(backend="weightsync"))
    build_tiny_qwen3(tmp_path / "base")
    save(str(tmp_path / "base"), tmp_path)
    rig, (old, new) = vllm.rig, vllm.rig.models
    sender = Sender("127.0.0.1", 2, "gloo", timeout_s=patient(60))

    def rpc(method: str, *args: object) -> object:
        return rig.engine.call(lambda llm: llm.collective_rpc(method, args=args))

    def loaded() -> set[int]:
        return rig.engine.call(lambda llm: llm.list_loras())

    def transfer(model: PreTrainedModel) -> None:
        rpc("start_weight_update")
        received = rig.threads.submit(rpc, "update_weights", {})
        sender.send(rig.held(model).items())
        received.result(patient(60))
        rpc("finish_weight_update")

    def asked() -> list[list[int]]:
        return vllm.answers(PROMPTS, ["sound"] * len(PROMPTS))

    wanted = asked()
    assert wanted != vllm.answers(PROMPTS, [""] * len(PROMPTS))
    rig.update(new, 2)
    assert loaded() == {NUMBERS["sound"]}, "WeightSync leaves adapters loaded"
    assert asked() != wanted
    joined = rig.threads.submit(rpc, "init_weight_transfer_engine", sender.init_info)
    sender.open()
    joined.result(patient(60))
    transfer(old)
    assert loaded() == set()
    vllm.answers(PROMPTS, [""] * len(PROMPTS))
    assert loaded() == set()
    assert asked() == wanted
    assert loaded() == {NUMBERS["sound"]}
    transfer(new)
    assert loaded() == set()
    shutil.rmtree(tmp_path / "sound")
    with pytest.raises(Exception, match=r"No adapter found for .*/sound"):
        asked()
    sender.close()
    vllm.close()


class _Source32:
    """A source as vLLM 0.32 has it; 0.33's says the same in other words."""

    def metadata(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="weight", shape=(2, 3))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2, 3)


class _Source33:
    metadata = [SimpleNamespace(name="weight", shape=(2, 3))]  # noqa: RUF012

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(2, 3)


@with_vllm
@pytest.mark.parametrize("source", [_Source32(), _Source33()], ids=["0.32", "0.33"])
def test_sources_of_both_shapes_are_read(source) -> None:
    from weightsync.plugins.vllm_trainer import shapes_of, tensors_of

    for _ in range(2):
        assert shapes_of(source) == {"weight": [2, 3]}
        ((name, tensor),) = tensors_of(source)
        assert (name, tensor.shape) == ("weight", (2, 3))
