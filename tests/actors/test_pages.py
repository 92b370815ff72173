"""What README, docs/performance.md and docs/faults.md show, run one after another as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.patience import patient
from tests.unit.project.test_docs import blocks
from weightsync.actors.engine import EngineActor
from weightsync.recipes.model import build_checkpoint
from weightsync.recipes.recipe import ModelSpec

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "docs", "exec"), names)


def test_the_loop_of_the_readme_and_what_the_other_pages_do_with_it(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model"
    build_checkpoint(path, ModelSpec(), seed=0)
    loop = next(block for block in blocks("README.md") if "WeightSync(" in block)
    names: dict[str, Any] = {"__name__": "__main__"}
    loop, given, end = loop.partition("sync.close()\n")
    assert (given, end) == ("sync.close()\n", "")  # the other pages go on with it
    run(loop.replace('"/models/qwen3-0.6b"', repr(str(path))).replace("range(1, 1000)", "range(1, 3)"), names)
    assert "version 2: 1.25 MB to 2 of 2 engines" in capsys.readouterr().out
    assert names["rollout"].version == 2
    assert len(names["rollout"].tokens[0]) == 16

    sync = names["sync"]
    try:
        for block in blocks("docs/performance.md"):
            run(block, names)
        shown = capsys.readouterr().out
        assert "engine e1 rank 0 load" in shown
        assert "on 4xh200: floor" in shown
        assert re.search(r"engine e1 rank 0: 1\.25 MB, floor \d+ µs, took", shown)

        names["start_engine"] = lambda name: ray.remote(EngineActor).remote("auto", str(path), name)
        register, inject = blocks("docs/faults.md")
        run(register, names)
        sync.connect()
        run(inject, names)
        for version in range(sync.version + 1, 9):
            sync.update_weights(version)
        sync.settle(patient(200))
        assert [heal.engine for heal in sync.heals] == ["e1"]
    finally:
        sync.close()
