"""The loop that is not ours: what it takes to plug weightsync in, and that it works then, as before."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from weightsync import TrainerShard
from weightsync.recipes.config.recipe import ModelSpec
from weightsync.recipes.training.model import build_checkpoint

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "recipes/loops/openrlhf_loop.py"
MAX_CHANGED = 10


def before() -> str:
    """The loop with its own broadcast."""
    kept = [line for line in LOOP.read_text().splitlines(keepends=True) if not line.endswith("  # +\n")]
    return re.sub(r"^( *)# - ", r"\1", "".join(kept), flags=re.MULTILINE)


def after() -> str:
    """The loop as it stands, without the notes on what stood there."""
    kept = [line for line in LOOP.read_text().splitlines(keepends=True) if not re.match(r" *# - ", line)]
    return re.sub(r"  # \+$", "", "".join(kept), flags=re.MULTILINE)


def changed() -> list[str]:
    lines = difflib.unified_diff(before().splitlines(), after().splitlines(), n=0, lineterm="")
    return [line for line in lines if re.match(r"[-+](?![-+]{2} )", line)]


def test_plugging_in_changes_at_most_ten_lines() -> None:
    added = [line for line in changed() if line[0] == "+"]
    assert len(added) <= MAX_CHANGED
    assert any("update_weights" in line for line in added)
    assert "broadcast_to_vllm.remote" in "".join(line for line in changed() if line[0] == "-")
    assert len(LOOP.read_text().splitlines()) <= 155


def test_the_guide_shows_these_lines() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    assert [line for line in shown.splitlines() if line[:1] in "+-" and line] == changed()


def test_a_trainer_need_not_call_our_constructor() -> None:
    class Trainer(TrainerShard):
        def __init__(self) -> None:
            self.model = nn.Linear(2, 3)

    assert [meta.name for meta in Trainer().sync_layout().rank_layout().tensors] == ["weight", "bias"]


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize("text", [before(), after()], ids=["broadcast", "weightsync"])
def test_the_engines_end_equal_to_the_trainers(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ModelSpec(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    model = build_checkpoint(tmp_path / "model", spec, seed=1)
    loop = ModuleType("users_own")  # what is not imported reaches Ray's workers as it is here
    exec(compile(text, "users_own", "exec"), loop.__dict__)
    *trained, first, second = loop.run(str(model))
    assert first == second == trained[0] == trained[1]
    assert len({tuple(tokens) for tokens in first}) > 8
    if "WeightSync" in text:
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version")]
        assert len(printed) == 3
        assert all(" verified" in line and "failed" not in line for line in printed)
