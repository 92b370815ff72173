"""`weightsync doctor --cluster` on several Ray nodes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fleets.local_cluster import forking_python
from tests.patience import patient
from weightsync.recipes import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_node_and_pair_is_shown_and_a_stopped_node_is_named() -> None:
    done = subprocess.run(
        [forking_python(), "-m", "tests.fleets.examined"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--address", "127.0.0.1:6"], "--address: '127.0.0.1:6' is not valid; give auto"),
        (["--address", "127.0.0.1:head"], "--address: '127.0.0.1:head' is not valid; give auto"),
        (["--ports", "20000"], "--ports: '20000' is not valid; give the first and the last port"),
        (["--ports", "20100-20000"], "the nearest range is 20000-20100"),
        (["--timeout", "0"], "--timeout: 0.0 is not valid; give seconds above 0"),
    ],
)
def test_bad_input_is_named(options: list[str], says: str) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--cluster", *options])
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("option", ["--address", "--ports", "--timeout"])
def test_options_of_a_cluster_need_it(option: str) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", option, "1"])
    assert result.exit_code == 2
    assert "it goes with --cluster" in result.stderr
