"""A vLLM that decodes speculatively: its greedy tokens are those of the target, version after version."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.conftest import Rig
from tests.contract.vllm_speculation import check_version, models
from tests.models import build_tiny_eagle, build_tiny_qwen3
from weightsync.engines.vllm.api import engine_args
from weightsync.engines.vllm.draft import VllmDraft
from weightsync.errors import EngineError, StateError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),  # vLLM looks at all modules
    pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning"),  # n-grams
]

NGRAM: Mapping[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


@pytest.fixture
def method() -> str:
    return "draft_model"


@pytest.fixture
def rig(method: str, tmp_path: Path) -> Iterator[Rig]:
    speculative: Mapping[str, Any] = NGRAM
    if method != "ngram":
        # The draft model is what the target becomes with the first of the rig's models.
        draft = tmp_path / ("1" if method == "draft_model" else "eagle")
        speculative = {"method": method, "model": str(draft), "num_speculative_tokens": 2}
        build_tiny_eagle(tmp_path / "eagle", third=method == "eagle3")
    rig = Rig("vllm", False, "host", tmp_path, {"draft": "frozen"}, speculative_config=speculative)
    yield rig
    rig.close()


@pytest.mark.faults
@pytest.mark.parametrize("method", ["ngram"])
def test_tokens_with_ngrams_are_those_of_the_target(rig: Rig) -> None:
    for version in (1, 2, 3):
        check_version(rig, version)
    assert rig.layout[0].draft is None


@pytest.mark.faults
def test_a_draft_model_is_accepted_by_the_version_that_equals_it(rig: Rig) -> None:
    """vLLM 0.32 gives it the target's dummy weights: they are replaced by those of its files."""
    accepted = [check_version(rig, version) for version in (1, 2, 3, 4)]
    assert (accepted[0], accepted[2]) == (1, 1)
    assert max(accepted[1], accepted[3]) < 0.5
    draft = rig.layout[0].draft
    assert draft
    assert (draft.method, draft.model, draft.num_hidden) == ("draft_model", str(rig.folder / "1"), 0)


@pytest.mark.parametrize(
    ("method", "num_tensors"),
    [("eagle", 6), pytest.param("eagle3", 11, marks=pytest.mark.faults)],  # qkv and gate_up are one each
)
def test_an_eagle_draft_keeps_its_weights_and_the_targets_embedding(
    rig: Rig, method: str, num_tensors: int
) -> None:
    target, draft = rig.engine.call(models)
    files = load_file(rig.folder / "eagle" / "model.safetensors")
    layer = "layers.0" if method == "eagle" else "midlayer"
    for version in (1, 2, 3):
        check_version(rig, version)
        embedding = draft.model.embed_tokens.weight.detach()
        assert embedding.data_ptr() == target.model.embed_tokens.weight.data_ptr()
        assert torch.equal(embedding, rig.models[(version - 1) % 2].model.embed_tokens.weight)
        assert (draft.lm_head is target.lm_head) == (method == "eagle")
        packed = dict(VllmDraft(method, "", draft).packed())
        assert torch.equal(packed["model.fc"].T, files["fc.weight"])
        down = next(weight for name, weight in packed.items() if name.endswith("mlp.down_proj"))
        assert torch.equal(down.T, files[f"{layer}.mlp.down_proj.weight"])
    described = rig.layout[0].draft
    assert described
    num_tensors += "draft_id_to_target_id" in dict(draft.named_parameters())  # before 0.31
    assert (described.method, described.num_tensors, described.num_hidden) == (method, num_tensors, 0)


@torch.no_grad()
def spoil(engine: Any, name: str) -> None:
    """Change one element of a draft. A packed layer is packed again, of other weights."""
    _, draft = models(engine)
    module = draft.get_submodule(name)
    if module.weight.numel():
        module.weight[0] += 1
    else:
        weight = module.cpu_linear(torch.eye(module.input_size_per_partition), module.weight, None).T.clone()
        weight[0, 0] += 1
        module.weight = torch.nn.Parameter(weight)
        module.quant_method.process_weights_after_loading(module)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mlp.down_proj"])
def test_a_draft_that_changed_fails_the_update_by_its_tensors_name(rig: Rig, name: str) -> None:
    check_version(rig, 1)
    rig.engine.call(lambda engine: spoil(engine, name))
    for _ in range(2):
        with pytest.raises(EngineError, match=f"verify: draft {name}.*: bytes are not those") as caught:
            rig.update(rig.models[1], 2)
    assert (caught.value.engine, caught.value.rank) == ("e0", 0)
    with pytest.raises(StateError, match="has no whole weights"):
        rig.engine.resume(2)


@pytest.mark.parametrize("knows", [True, False], ids=["as later versions have it", "as 0.24 has it"])
def test_a_runner_that_gives_a_draft_dummy_weights_is_not_chosen(
    knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader import utils

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")  # so that what the code sets is undone
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if knows:
        monkeypatch.setattr(utils, "get_draft_load_config", object(), raising=False)
    else:
        monkeypatch.delattr(utils, "get_draft_load_config", raising=False)
    build_tiny_qwen3(tmp_path / "model")
    path, draft = (
        str(tmp_path / "model"),
        {"method": "eagle", "model": "a/draft", "num_speculative_tokens": 2},
    )
    engine_args(path, {"speculative_config": NGRAM}, "weightsync.WeightSyncWorker")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ, "there is no draft"
    engine_args(path, {"speculative_config": draft}, "weightsync.WeightSyncWorker")
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == (None if knows else "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine_args(path, {"speculative_config": draft}, "weightsync.WeightSyncWorker")
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1", "the user has set it"
