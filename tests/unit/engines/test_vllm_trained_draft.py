"""Which drafts of vLLM can be trained, and what they share with their target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.engines.vllm.draft import draft_of
from weightsync.engines.vllm.trained_draft import VllmTrainedDraft
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta

CPU = torch.device("cpu")


class Layers(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def load_weights(self, weights: Any) -> None:
        self.given = [*getattr(self, "given", []), [name for name, _ in weights]]


def models() -> tuple[Layers, Layers]:
    """Return a target with a tied head, and a draft that uses its embedding and head."""
    embed = nn.Embedding(4, 2)
    target = Layers(model=Layers(embed_tokens=embed, norm=nn.LayerNorm(2)), lm_head=embed)
    draft = Layers(model=Layers(embed_tokens=embed, fc=nn.Linear(2, 2)), lm_head=embed)
    return target, draft


def runner(method: str = "eagle", draft: nn.Module | None = None, **settings: Any) -> Any:
    target, own = models()
    drafts = SimpleNamespace(model="a/draft", quantization=settings.get("draft_quantization"))
    drafts.dtype = torch.bfloat16
    drafts.hf_config = SimpleNamespace(
        architectures=[settings.get("architecture", "Glm4MoeMTPModel")],
        num_hidden_layers=3,
        num_nextn_predict_layers=2,
    )
    speculative = SimpleNamespace(method=method, model="given", draft_model_config=drafts)
    speculative.parallel_drafting = settings.get("parallel_drafting", False)
    parallel = SimpleNamespace(
        pipeline_parallel_size=settings.get("pipeline_parallel_size", 1),
        enable_eplb=settings.get("enable_eplb", False),
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculative, parallel_config=parallel),
        model_config=SimpleNamespace(quantization=settings.get("quantization")),
        get_model=lambda: target,
        get_draft_model=lambda: draft or own,
    )


def trained(**settings: Any) -> VllmTrainedDraft:
    found = draft_of(runner(**settings), CPU, "trained")
    assert isinstance(found, VllmTrainedDraft)
    return found


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_a_draft_of_these_methods_may_have_dummy_weights(method: str) -> None:
    draft = trained(method=method)
    assert (draft.method, draft.path) == (method, "a/draft")


@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_others_are_refused_by_name(method: str) -> None:
    told = rf"speculative_config: .*'{method}'.*methods draft_model, eagle, eagle3, mtp can .*freeze it"
    with pytest.raises(ConfigError, match=told):
        trained(method=method)


def test_mtp_layers_of_other_families_are_refused_by_name() -> None:
    told = (
        r"speculative_config: .*'mtp'.*only Glm4MoeMTPModel, .*MiMoMTPModel can .*not ErnieMTPModel: freeze"
    )
    with pytest.raises(ConfigError, match=told):
        trained(method="mtp", architecture="ErnieMTPModel")


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("parallel_drafting", True, r"speculative_config\.parallel_drafting"),
        ("draft_quantization", "fp8", r"speculative_config\.quantization"),
        ("quantization", "fp8", "quantization"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size"),
    ],
)
def test_settings_with_which_not_all_of_it_would_be_written_are_refused(
    setting: str, value: object, named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{named}: {value!r} .*freeze it"):
        trained(**{setting: value})


def test_what_it_shares_is_named_as_files_may_name_it() -> None:
    assert trained().shared() == {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "model.embed_tokens.weight",
    }
    alone = Layers(model=Layers(fc=nn.Linear(2, 2)))
    assert trained(draft=alone).shared() == {}


def test_the_embedding_that_each_mtp_layer_repeats_is_the_targets() -> None:
    shared = trained(method="mtp").shared()
    assert {name for name, held in shared.items() if held == "model.embed_tokens.weight"} == {
        "model.embed_tokens.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        "model.layers.3.embed_tokens.weight",
        "model.layers.4.embed_tokens.weight",
    }


def test_mtp_layers_are_those_of_the_targets_files(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"model.layers.3.eh_proj.weight": {"dtype": "F32", "shape": [2, 4]}}
    headers["model.layers.3.embed_tokens.weight"] = {"dtype": "F32", "shape": [4, 2]}
    headers["model.layers.2.mlp.weight"] = {"dtype": "F32", "shape": [2, 2]}
    monkeypatch.setattr("weightsync.engines.vllm.trained_draft.file_headers", lambda _: headers)
    draft = trained(method="mtp")
    assert draft.checkpoint().tensors == (TensorMeta("model.layers.3.eh_proj.weight", "bfloat16", (2, 4)),)
    del headers["model.layers.3.eh_proj.weight"], headers["model.layers.3.embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: 'a/draft' .*no model\.layers\.3\.\*"):
        draft.checkpoint()


def test_a_layer_of_its_own_with_the_targets_memory_is_refused() -> None:
    serving = runner()
    draft = serving.get_draft_model()
    draft.lm_head = nn.Linear(2, 4, bias=False)
    draft.lm_head.weight = nn.Parameter(serving.get_model().lm_head.weight.detach())
    with pytest.raises(
        ConfigError, match=r"speculative_config: .*lm_head\.weight is in the memory of the target"
    ):
        draft_of(serving, CPU, "trained")


def test_its_reload_has_its_own_modules_alone() -> None:
    assert [name for name, _ in trained().own.named_parameters()] == ["model.fc.weight", "model.fc.bias"]


def test_its_loader_is_given_one_tensor_at_a_time() -> None:
    draft = trained()
    draft.load_weights((name, torch.zeros(1)) for name in ("a", "b"))
    assert draft.model.given == [["a"], ["b"]]
