"""A vLLM whose draft is trained: its bytes are the trainer's in each version."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.conftest import Rig
from tests.contract.vllm_speculation import check_live, check_version, live_draft, models
from tests.models import build_tiny_eagle, build_tiny_qwen3
from weightsync.memory.tensors import named_tensors
from weightsync.plan.layout.draft import DRAFT

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),  # vLLM looks at all modules
]

TRAINED = {"draft": "trained"}


def draft_weights(folder: Path, method: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of a trainer's draft, after making its folder for an engine."""
    if method == "draft_model":
        return dict(named_tensors(build_tiny_qwen3(folder, seed=seed))[0])
    build_tiny_eagle(folder, third=method == "eagle3", seed=seed, vocab_size=128)
    weights = load_file(folder / "model.safetensors")
    weights.pop("t2d", None)  # vLLM does not use it
    return weights


@pytest.fixture
def method() -> str:
    return "draft_model"


@pytest.fixture
def rig(method: str, tmp_path: Path) -> Iterator[Rig]:
    """An engine that has read other weights of a draft than those of its trainer, or none."""
    weights = draft_weights(tmp_path / "trainer", method, seed=1)
    draft_weights(tmp_path / "draft", method, seed=5)
    if method == "draft_model":
        (tmp_path / "draft" / "model.safetensors").unlink()  # a trained draft needs no weights at first
    speculative = {"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    rig = Rig("vllm", False, "host", tmp_path, TRAINED, weights, speculative_config=speculative)
    yield rig
    rig.close()


@pytest.mark.faults
def test_a_draft_model_is_accepted_by_the_version_in_which_it_equals_the_target(rig: Rig) -> None:
    equal, other = rig.draft, dict(named_tensors(rig.models[1])[0])
    # rig.models alternate: both change, then only the target, then only the draft, then both.
    accepted = []
    for version, draft in ((1, equal), (2, equal), (3, other), (4, other)):
        rig.draft = draft
        accepted.append(check_version(rig, version))
        check_live(rig.engine.call(live_draft), draft)
    assert (accepted[0], accepted[3]) == (1, 1)
    assert max(accepted[1], accepted[2]) < 0.5
    draft = rig.layout[0].draft
    assert draft
    assert (draft.method, draft.trained) == ("draft_model", True)


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=pytest.mark.faults), "eagle3"])
def test_an_eagle_draft_is_its_trainers_beside_the_targets_embedding(
    rig: Rig, method: str, tmp_path: Path
) -> None:
    weights = [rig.draft, draft_weights(tmp_path / "second", method, seed=2)]
    for version in (1, 2, 3):
        rig.draft = weights[version // 2]
        check_version(rig, version)
        target, draft = rig.engine.call(models)
        assert draft.model.embed_tokens is target.model.embed_tokens
        assert (draft.lm_head is target.lm_head) == (method == "eagle")
        check_live(rig.engine.call(live_draft), rig.draft)
    assert (DRAFT + "embed_tokens.weight", "model.embed_tokens.weight") in rig.layout[0].tied
    assert ((DRAFT + "lm_head.weight", "model.embed_tokens.weight") in rig.layout[0].tied) == (
        method == "eagle"
    )
