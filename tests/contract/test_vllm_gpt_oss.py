"""vLLM's loader of GPT-OSS writes experts and sinks without their loaders: these become live all the same.

After two updates, a vLLM has what one has that loaded the second version's files, and says the same.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from tests.contract.conftest import Rig
from tests.contract.test_vllm_quantized import Served
from tests.models import redraw

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

PROMPT = [5, 6, 7]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}


def build_tiny_gpt_oss(path: Path, seed: int) -> PreTrainedModel:
    config = GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=YARN,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        redraw(model, seed)
    model.save_pretrained(path)
    return model


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    models = [build_tiny_gpt_oss(tmp_path / str(seed), seed) for seed in (1, 2)]
    rig = Rig("vllm", False, "host", tmp_path, models=models)
    yield rig
    rig.close()


def test_gpt_oss_has_what_one_has_that_loaded_the_files(rig: Rig, tmp_path: Path) -> None:
    for version, model in enumerate(rig.models, start=1):
        rig.update(model, version)
        tokens = rig.generate([PROMPT]).result().tokens
        assert rig.serves(model, [PROMPT], tokens)
    fed = held(live(rig))
    rig.update(rig.models[1], 3)
    again = held(live(rig))
    assert differing(fed, again) == [], "an equal update changes nothing"
    logits = logits_of(live(rig))
    assert rig.generate([PROMPT]).result().tokens == tokens
    rig.close()
    files = Served(tmp_path / "2", "auto", dtype="float32", max_model_len=128)
    loaded = held(files.runner.get_model())
    expected = logits_of(files.runner.get_model())
    assert files.says() == tokens[0]
    files.close()
    assert differing(again, loaded) == []
    assert "model.layers.0.attn.sinks" in loaded
    assert len(logits) == len(expected) == 16
    assert all(map(torch.equal, logits, expected))


def live(rig: Rig) -> nn.Module:
    return rig.engine.call(lambda llm: llm.model_executor.driver_worker.worker.model_runner.get_model())


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy parameters, buffers and what modules hold beside them."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        its = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, each in itertools.chain(vars(module).items(), *its):
            if isinstance(each, torch.Tensor) and name != "kv_cache":
                found[f"{path}.{name}"] = each.detach().clone()
    return found


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, each in one.items() if not torch.equal(each, other[name])]


def logits_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a list that gets the logits of each of the model's steps."""
    made: list[torch.Tensor] = []
    model.get_submodule("logits_processor").register_forward_hook(lambda *args: made.append(args[-1].clone()))
    return made
