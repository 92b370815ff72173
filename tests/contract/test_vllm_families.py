"""A real vLLM of families of its own kinds computes with the bytes of a vLLM that loaded their files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.contract.test_vllm_quantized import Served
from tests.families import FAMILIES, build_family
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.controller import Controller
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.engines.vllm.api import require_updatable
from weightsync.errors import ConfigError
from weightsync.holder.holder import Holder
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
CONFIG = SyncConfig(timeout_s=patient(60), connect_timeout_s=patient(60))
PROMPTS = [[5, 6, 7], [200, 3, 90, 41]]
SAMPLING = {"max_tokens": 12, "temperature": 0.0}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    family: {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}
    for family in ("gemma3", "qwen2_vl", "qwen3_vl")
}


def live(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers that vLLM's engine computes with."""
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


async def update(source: ModuleSource, engine: VllmEngine, models: list[torch.nn.Module]) -> None:
    holder = Holder("holder", "127.0.0.1")
    try:
        members = {"e": EngineMember(LocalEngine(engine), (0,))}
        controller = Controller(CONFIG, Fleet([(LocalTrainer(source), 0)], members, [LocalPeer(holder)]))
        await controller.connect()
        for version, model in enumerate(models, 1):
            source.replace(model)
            await controller.update(version)
    finally:
        source.close()
        holder.close()


def test_transformers_builds_what_vllm_has_decorated_apart_from_it() -> None:
    """As its transformers backend decorates the classes of a model that vLLM has no class for."""
    from transformers import Olmo2Config, Olmo2Model
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import VllmConfig

    from weightsync.engines.vllm.api import building

    @support_torch_compile(dynamic_arg_dims={"input_ids": 0})
    class Decorated(Olmo2Model):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    config = Olmo2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, pad_token_id=0
    )
    with pytest.raises(AssertionError, match="Current vLLM config is not set"):
        Decorated(config)
    with building(VllmConfig()), torch.device("meta"):
        names = Decorated(config).state_dict().keys()
    assert names == Olmo2Model(config).state_dict().keys()


def test_experts_that_vllm_pads_are_refused_by_name() -> None:
    """As it does on a CPU, if a rank has other than a multiple of 32 rows of each."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 2 * 48, 64), requires_grad=False)
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model="folder"))
    require_updatable(config, model)
    model.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 2 * 64, 64), requires_grad=False)
    with pytest.raises(
        ConfigError, match=r"model: 'folder'.* pads the 48 rows .* in experts.* multiple of 32"
    ):
        require_updatable(config, model)


@pytest.mark.faults
@pytest.mark.parametrize("rows", [16, 48])
def test_a_model_with_few_rows_of_each_expert_is_refused_when_it_connects(rows: int, tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path, moe=True, rows=rows)
    engine = VllmEngine(str(tmp_path), "e", {"max_model_len": 64})
    try:
        with pytest.raises(
            ConfigError, match=rf"pads the {rows} rows that a rank has of each expert in .*mlp"
        ):
            engine.layout()
    finally:
        engine.close()


def check(family: str, tmp_path: Path) -> None:
    if family in OPTIONS:
        pytest.importorskip("torchvision", reason="vLLM imports these models with torchvision alone")
    options = {"max_model_len": 64, "enforce_eager": True, "dtype": "float32", **OPTIONS.get(family, {})}
    models = [build_family(tmp_path / str(seed), family, seed) for seed in range(2)]
    engine = VllmEngine(str(tmp_path / "0"), "e", options)
    try:
        asyncio.run(update(ModuleSource(models[0]), engine, models))
        served, said = engine.call(live), engine.generate(PROMPTS, SAMPLING).tokens
    finally:
        engine.close()
    loaded = Served(tmp_path / "1", "auto", **options)
    try:
        wanted = live(loaded.engine)
        assert served.keys() == wanted.keys()
        differ = [name for name in wanted if not torch.equal(served[name], wanted[name])]
        assert not differ
        assert said[0] == loaded.says()[: len(said[0])]
    finally:
        loaded.close()


@pytest.mark.faults
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"nemotron_h_moe"}))
def test_its_bytes_and_tokens_are_those_of_files(family: str, tmp_path: Path) -> None:
    """On a CPU, vLLM does not serve experts without a gate."""
    check(family, tmp_path)
