"""The hooks that Git runs before a commit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def test_the_hooks_run_the_pinned_ruff() -> None:
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    (revision,) = (repo["rev"] for repo in HOOKS if repo["repo"].endswith("/ruff-pre-commit"))
    assert revision == f"v{pinned[1]}"


def test_the_hook_for_old_words_runs_a_module_that_is_there() -> None:
    (hook,) = (hook for repo in HOOKS if repo["repo"] == "local" for hook in repo["hooks"])
    *command, module = shlex.split(hook["entry"])
    assert command == ["python3", "-m"]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
