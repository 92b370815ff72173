"""A checkpoint is described by its own folder: the class, the names that files have, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import MixtralConfig, OlmoHybridConfig

from tests.families import RENAMED, build_family
from weightsync.engines.loading.checkpoint import checkpoint_of
from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.torch.torch_module import TorchEngine
from weightsync.errors import ConfigError
from weightsync.memory.file_names import FileNames
from weightsync.memory.tensors import named_tensors
from weightsync.sources.checkpoint.safetensors_files import contents
from weightsync.sources.module import ModuleSource

REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(config.width, 3)
        self.post_init()
"""


@pytest.mark.parametrize("family", RENAMED)
def test_engine_trainer_and_files_name_the_same_tensors(family: str, tmp_path: Path) -> None:
    model = build_family(tmp_path, family)
    wanted = {(meta.name, meta.dtype, meta.shape) for meta in contents([str(tmp_path)]).tensors}
    described = checkpoint_of(ModelFolder(str(tmp_path)), torch.float32)
    sent = ModuleSource(model).layout()
    (live,) = TorchEngine(str(tmp_path), "e", {}).layout()
    for metas in (described.tensors, sent.tensors, live.tensors):
        assert {(meta.name, meta.dtype, meta.shape) for meta in metas} == wanted
    assert described.tied == sent.tied == live.tied
    assert [meta.name for meta in live.buffers] == [*named_tensors(model)[0]]
    assert described.linears >= {f"{name}.weight" for name in ("lm_head",) if not described.tied}


def test_a_class_that_fsdp_has_made_and_a_wrapper_change_nothing(tmp_path: Path) -> None:
    for family in ("mixtral", "qwen2_vl"):
        model = build_family(tmp_path / family, family)
        names = FileNames.of(model, model.state_dict()).names
        assert names
        model.__class__ = type(f"FSDP{type(model).__name__}", (FSDPModule, type(model)), {})
        assert FileNames.of(model, model.state_dict()).names == names
        wrapper = nn.ModuleDict({"policy": model, "value": nn.Linear(2, 1)})
        prefixed = {f"policy.{old}": f"policy.{new}" for old, new in names.items()}
        assert FileNames.of(wrapper, wrapper.state_dict()).names == prefixed
        assert FileNames.of(wrapper, model.state_dict()).names == names, "without the wrapper's prefix"


def test_what_transformers_computes_from_files_is_refused_by_name(tmp_path: Path) -> None:
    OlmoHybridConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
        architectures=["OlmoHybridForCausalLM"],
    ).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"computes model\.layers\.0\.linear_attn\.conv1d\.weight from .*q_conv1d"
    ) as caught:
        checkpoint_of(ModelFolder(str(tmp_path)), torch.float32)
    assert "\n" not in str(caught.value)
    TorchEngine(str(tmp_path), "e", {}).layout()


def test_the_class_is_the_first_of_the_architectures(tmp_path: Path) -> None:
    config = MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    for given, kind in (
        ({}, "MixtralForCausalLM"),
        ({"architectures": ["MixtralForSequenceClassification"]}, "MixtralForSequenceClassification"),
        ({"architectures": ["MixtralModelOfMine"]}, "MixtralForCausalLM"),
        # No type that transformers knows, as Kimi-K2's.
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mine"}, "MixtralForCausalLM"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(stored | given))
        folder = ModelFolder(str(tmp_path), overrides={"num_local_experts": 2})
        model = folder.build(torch.bfloat16, "meta")
        assert type(model).__name__ == kind
        assert model.dtype == torch.bfloat16
        assert folder.config().num_local_experts == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3", "layer_types": ["mine"], "num_hidden_layers": 1}, "layer_types"),
        (None, "config.json"),
        ({"model_type": "mine"}, "mine"),
        ({"model_type": "blip_text_model"}, "blip_text"),
    ],
)
def test_a_model_that_transformers_does_not_know_is_one_line(
    config: dict[str, str] | None, reason: str, tmp_path: Path
) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=rf"model: .*transformers {transformers.__version__} .*{reason}"
    ) as caught:
        ModelFolder(str(tmp_path)).build(torch.float32, "meta")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_code_that_comes_with_a_model_runs_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(REMOTE)
    mapped = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    stored = {"model_type": "own", "width": 4, "architectures": ["OwnModel"], "auto_map": mapped}
    (folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        TorchEngine(str(folder), "e", {})
    engine = TorchEngine(str(folder), "e", {"trust_remote_code": True})
    assert engine.model.head.weight.shape == (3, 4)
    described = checkpoint_of(ModelFolder(str(folder), trust_remote_code=True), torch.float32)
    assert [meta.name for meta in described.tensors] == ["head.weight", "head.bias"]
