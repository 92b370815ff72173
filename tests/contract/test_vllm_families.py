"""What vLLM needs to know of a family before it connects; test_families.py has the families themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import build_tiny_qwen3
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.engines.vllm.api import require_updatable
from weightsync.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


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
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model="folder"), speculative_config=None)
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
