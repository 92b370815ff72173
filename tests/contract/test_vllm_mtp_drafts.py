"""A vLLM that drafts with MTP layers of its own checkpoint, which are its trainer's, or frozen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import Rig
from tests.contract.vllm_speculation import check_live_mtp, check_version, live_draft, models
from tests.mtp_models import FAMILIES, build_tiny_mtp, mtp_weights
from weightsync.config import Components

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),  # vLLM looks at all modules
]

TRAINED, FROZEN = {"draft": "trained"}, {"draft": "frozen"}


@pytest.fixture
def components() -> Components:
    return TRAINED


@pytest.fixture
def rig(family: str, components: Components, tmp_path: Path) -> Iterator[Rig]:
    """An engine that has read the files of another MTP layer than its trainer's."""
    targets = [build_tiny_mtp(tmp_path / str(1 + seed), family, seed, mtp_seed=5) for seed in (0, 1)]
    options = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    weights = mtp_weights(tmp_path / "1", family, 0) if components == TRAINED else {}
    rig = Rig("vllm", False, "host", tmp_path, components, weights, targets, **options)
    yield rig
    rig.close()


@pytest.mark.parametrize("family", ["mimo", pytest.param("glm", marks=pytest.mark.faults)])
def test_mtp_layers_are_their_trainers_beside_the_targets_embedding_and_head(rig: Rig, family: str) -> None:
    equal, other = rig.draft, mtp_weights(rig.folder / "1", family, 1)
    accepted = []
    for version, draft in ((1, equal), (2, other), (3, other), (4, equal), (5, equal)):
        rig.draft = draft
        accepted.append(check_version(rig, version))
        check_live_mtp(rig.engine.call(live_draft), draft, FAMILIES[family])
    # Only at 1 and 5 both say what a token alone leads to. At 2 and 4 the target says more, at 3 the draft.
    assert (accepted[0], accepted[4]) == (1, 1)
    assert max(accepted[1:4]) < 0.5
    target, draft = rig.engine.call(models)
    assert draft.model.embed_tokens is target.model.embed_tokens
    heads = [
        module for name, module in draft.named_modules() if name.endswith(("lm_head", "shared_head.head"))
    ]
    assert all(head is target.lm_head for head in heads)
    held = rig.layout[0].draft
    assert held
    assert (held.method, held.trained, held.model) == ("mtp", True, str(rig.folder / "1"))


@pytest.mark.faults
@pytest.mark.parametrize("components", [FROZEN], ids=["frozen"])
@pytest.mark.parametrize("family", ["glm", "mimo"])
def test_frozen_mtp_layers_keep_the_weights_of_their_files(rig: Rig, family: str) -> None:
    written = mtp_weights(rig.folder / "1", family, 5)
    for version in (1, 2, 3):
        assert check_version(rig, version) < 0.5
        check_live_mtp(rig.engine.call(live_draft), written, FAMILIES[family])
    held = rig.layout[0].draft
    assert held
    assert (held.method, held.num_hidden) == ("mtp", 0)
