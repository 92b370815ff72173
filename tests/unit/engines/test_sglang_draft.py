from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightsync.engines.drafts.trained_draft import TrainedDraft
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.sglang.draft import SglangTrainedDraft, Speculation, draft_of
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta

CPU = torch.device("cpu")


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(6, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)


class Eagle(nn.Module):
    """As SGLang's EAGLE-3: the embedding is the target's, in a module of the draft."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(6, 4)
        self.model.embed_tokens.weight = target.model.embed_tokens.weight
        self.model.fc = nn.Linear(12, 4, bias=False)
        self.lm_head = nn.Linear(4, 3, bias=False)


def eagle(folder: Path) -> tuple[TrainedDraft, SglangTrainedDraft]:
    target = Target()
    held = {
        "embed_tokens.weight": torch.zeros(6, 4),
        "fc.weight": torch.zeros(4, 12),
        "lm_head.weight": torch.zeros(3, 4),
        "d2t": torch.zeros(3, dtype=torch.int64),
        "t2d": torch.zeros(6, dtype=torch.bool),
    }
    save_file(held, folder / "model.safetensors")
    speculation = Speculation("EAGLE3", str(folder), None)
    draft = draft_of(speculation, Eagle(target), target, torch.bfloat16, CPU, "trained")
    assert isinstance(draft, SglangTrainedDraft)
    return TrainedDraft(draft, target), draft


def test_what_it_shares_travels_as_the_targets(tmp_path: Path) -> None:
    joined, _ = eagle(tmp_path)
    metas = (
        TensorMeta("model.embed_tokens.weight", "bfloat16", (6, 4)),
        TensorMeta("lm_head.weight", "bfloat16", (6, 4)),
    )
    checkpoint = joined.join(Checkpoint(metas, (), frozenset()))
    assert [(meta.name, meta.dtype) for meta in checkpoint.tensors[2:]] == [
        ("draft/fc.weight", "bfloat16"),
        ("draft/lm_head.weight", "bfloat16"),
    ]
    assert ("draft/embed_tokens.weight", "model.embed_tokens.weight") in checkpoint.tied


def test_its_own_modules_are_those_without_memory_of_the_target(tmp_path: Path) -> None:
    joined, draft = eagle(tmp_path)
    assert {name for name, _ in draft.model.named_parameters()} == {"model.fc.weight", "lm_head.weight"}
    assert {name for name, _ in joined.modules.named_parameters()} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "draft/model.fc.weight",
        "draft/lm_head.weight",
    }


def test_a_folder_without_files_says_what_is_missing(tmp_path: Path) -> None:
    target = Target()
    speculation = Speculation("EAGLE", str(tmp_path), None)
    draft = draft_of(speculation, Eagle(target), target, torch.bfloat16, CPU, "trained")
    assert isinstance(draft, SglangTrainedDraft)
    with pytest.raises(ConfigError, match=r"options.speculative_draft_model_path: .*safetensors"):
        draft.checkpoint()


def test_files_are_read_for_a_draft_and_its_path_is_the_models_by_default() -> None:
    arguments = {"model_path": "/m", "speculative_algorithm": "NEXTN"}
    assert Speculation.of(arguments) == Speculation("NEXTN", "/m", None)
    assert arguments["speculative_draft_model_path"] == "/m"
    assert arguments["speculative_draft_load_format"] == "auto"
    assert Speculation.of({"model_path": "/m"}) is None
    assert Speculation.of({"model_path": "/m", "speculative_algorithm": "NGRAM"}) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"speculative_algorithm": "STANDALONE"}, r"speculative_algorithm: 'STANDALONE' .*EAGLE, EAGLE3"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_load_format": "dummy"},
            r"options.speculative_draft_load_format: 'dummy' .*leave it out",
        ),
    ],
)
def test_what_no_draft_can_be_served_with_is_refused(given: Mapping[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Speculation.of({"model_path": "/m", **given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"speculative_algorithm": "NEXTN"}, r"'NEXTN' .*only MiMoMTP can .*not Eagle: freeze it"),
        (
            {"speculative_algorithm": "EAGLE", "quantization": "fp8"},
            r"options.quantization: 'fp8' .*freeze it",
        ),
    ],
)
def test_what_a_draft_cannot_be_trained_with_is_refused(given: Mapping[str, object], told: str) -> None:
    speculation = Speculation.of({"model_path": "/m", **given})
    assert speculation
    target = Target()
    with pytest.raises(ConfigError, match=told):
        draft_of(speculation, Eagle(target), target, torch.bfloat16, CPU, "trained")
    assert draft_of(speculation, Eagle(target), target, torch.bfloat16, CPU, "frozen").path == "/m"


class MiMoMTP(nn.Module):
    """As SGLang's: a layer in the target's checkpoint, with the target's embedding and head."""

    def __init__(self, target: Target, num_layers: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_nextn_predict_layers=num_layers)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(6, 4)
        self.model.embed_tokens.weight = target.model.embed_tokens.weight
        self.model.input_proj = nn.Linear(8, 4, bias=False)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = target.lm_head.weight


class ErnieMTP(MiMoMTP):
    """Of another family."""


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])  # the same to SGLang
def test_of_a_layers_files_the_layer_alone_is_its_own(algorithm: str, tmp_path: Path) -> None:
    target = Target()
    draft = MiMoMTP(target)
    speculation = Speculation(algorithm, str(tmp_path), None)
    trained = draft_of(speculation, draft, target, torch.bfloat16, CPU, "trained")
    assert isinstance(trained, SglangTrainedDraft)
    held = {"model.embed_tokens.weight": torch.zeros(6, 4), "model.layers.0.weight": torch.zeros(4, 4)}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"draft_model_path: .*model\.mtp_layers\.0\.\*"):
        trained.checkpoint()
    held["model.mtp_layers.0.input_proj.weight"] = torch.zeros(4, 8)
    save_file(held, tmp_path / "model.safetensors")
    meta = TensorMeta("model.mtp_layers.0.input_proj.weight", "bfloat16", (4, 8))
    assert trained.checkpoint().tensors == (meta,)
    assert trained.shared()["lm_head.weight"] == "lm_head.weight"
    assert trained.shared()["model.embed_tokens.weight"] == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        (ErnieMTP(Target()), r"'EAGLE' .*only MiMoMTP can be trained, not ErnieMTP: freeze it"),
        (MiMoMTP(Target(), num_layers=2), r"num_nextn_predict_layers: 2 .*into one layer of MiMoMTP: freeze"),
    ],
)
def test_other_layers_are_refused_under_each_name(draft: nn.Module, told: str) -> None:
    speculation = Speculation("EAGLE", "/m", None)
    with pytest.raises(ConfigError, match=told):
        draft_of(speculation, draft, Target(), torch.bfloat16, CPU, "trained")
    assert draft_of(speculation, draft, Target(), torch.bfloat16, CPU, "frozen").model is draft
