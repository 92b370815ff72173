"""The quickstart with the faults that are shipped for it, from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.actors.test_quickstart import weightsync


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_reward_reaches_its_mark_and_the_report_tells_of_every_heal(tmp_path: Path) -> None:
    settings = ("--set", "engines.main.kind=torch", "--out", str(tmp_path / "run"))
    done = weightsync("run", "quickstart", "--chaos", "chaos", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["status"] == "done"
    assert all(step["verified"] for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 26, "main-1": 26}
    killed = next(heal for heal in report["heals"] if heal["engine"] == "main-1")
    flipped = next(heal for heal in report["heals"] if heal["engine"] == "main-0")
    assert killed["died_at"] < killed["respawned_at"] < killed["serving_at"] < killed["died_at"] + 60
    assert "is gone" in killed["cause"]
    assert flipped["respawned_at"] is None
    assert "wrong bytes" in flipped["cause"]
    for heal in (killed, flipped):
        assert heal["verified"]
        assert heal["bytes_from"].keys() == heal["ways"].keys() == {"holder 0", "holder 1"}
        assert heal["gb_per_s"] > 0
