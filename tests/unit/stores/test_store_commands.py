"""`weightsync publish` and `weightsync follow`, and the page about them."""

from __future__ import annotations

import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.pages import ROOT, blocks
from tests.patience import patient
from tests.unit.stores.store_rig import change, content, save, tensors
from weightsync.recipes import cli

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weightsync(*arguments: str, code: int = 0) -> str:
    done = RUNNER.invoke(cli.app, arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_the_page_publishes_and_follows(tmp_path: Path) -> None:
    held = tensors()
    save(tmp_path / "model", held)
    (block,) = blocks("docs/stores.md", "sh")
    commands = [
        shlex.split(line.replace("/mnt/policy", f"{tmp_path}/store").replace("runs/model", "model"))[1:]
        for line in block.splitlines()
    ]
    (tmp_path / "runs").mkdir()
    said = "".join(weightsync(*command) for command in commands)
    assert "version 1: an anchor, " in said
    assert "version 1: 53.1 kB downloaded in " in said
    assert content(tmp_path / "runs/policy/current") == content(tmp_path / "model")
    assert "version 1: it has the same files, so nothing is uploaded" in weightsync(*commands[0])
    change(held, 0.02, 1)
    save(tmp_path / "model", held)
    assert "version 2: a delta, " in weightsync(*commands[0], "--keep", "1")
    assert "version 2: " in weightsync(*commands[1])
    save(tmp_path / "model", held, 5)
    assert "version 3: an anchor, " in weightsync(*commands[0], "--anchor")
    assert "removed 2 versions and 0 objects" in weightsync(*commands[0], "--keep", "1")
    assert "version 3: " in weightsync(*commands[1])
    assert content(tmp_path / "runs/policy/current") == content(tmp_path / "model")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    model = str(save(tmp_path / "model", tensors()))
    weightsync("publish", model, store)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/model.safetensors").write_bytes(b"\0" * 20)
    cases = [
        (2, "valid: file, gs, memory, s3", ["publish", model, "ftp://host/policy"]),
        (2, "no *.safetensors is in this folder", ["publish", "empty", store]),
        (2, "not a safetensors file", ["publish", "cut", store]),
        (2, "there is no nowhere", ["publish", "nowhere", store]),
        (2, "give a folder to write to", ["publish", model, store, "--copy", f"{model}/config.json"]),
        (2, f"URL: 'file://{tmp_path}/none'", ["follow", f"file://{tmp_path}/none", "f"]),
        (1, "it is not there; versions 1 to 1 are", ["follow", store, "f", "--version", "7"]),
        (1, "it is not there; none is", ["follow", "memory://empty", "f", "--once"]),
    ]
    for code, says, arguments in cases:
        said = weightsync(*arguments, code=code)
        assert says in said
        assert said.count("\n") == 1


def test_follow_goes_on_until_it_is_stopped(tmp_path: Path) -> None:
    """It begins before the first version, survives a damaged one, and takes one that has the same number."""
    (tmp_path / "store").mkdir()
    held, current = tensors(), tmp_path / "f" / "current"
    command = [sys.executable, "-m", "weightsync.recipes.cli", "follow", f"file://{tmp_path}/store"]
    with subprocess.Popen(
        [*command, str(tmp_path / "f"), "--every", "0.05"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert "has no version yet" in process.stdout.readline()
        for version in (1, 2, 3):
            files = save(tmp_path / "model", held, version)
            weightsync("publish", str(files), f"file://{tmp_path}/store")
            assert process.stdout.readline().startswith(f"version {version}: ")
            assert content(current) == content(files)
            change(held, 0.02, version)
        (tmp_path / "store/versions/00000004.json").write_text("torn")
        assert any("4.json of version 4: it is damaged: " in line for line in process.stdout)
        (tmp_path / "store/versions/00000004.json").unlink()
        weightsync("publish", str(save(tmp_path / "model", held, 4)), f"file://{tmp_path}/store")
        assert any(line.startswith("version 4: ") for line in process.stdout)
        assert content(current) == content(tmp_path / "model")
        for version in range(1, 5):
            files = save(tmp_path / "model", tensors(7), version)
            weightsync("publish", str(files), f"file://{tmp_path}/again", "--copy", "copy")
        (tmp_path / "store").rename(tmp_path / "before")
        (tmp_path / "again").rename(tmp_path / "store")
        assert any(line.startswith("version 4: ") for line in process.stdout)
        assert content(current) == content(tmp_path / "model")
        shutil.rmtree(tmp_path / "f" / "objects")
        (tmp_path / "f" / "objects").mkdir()
        assert any(line.startswith("version 4: ") for line in process.stdout), "removed files come back"
        assert content(current) == content(tmp_path / "model")
        process.send_signal(signal.SIGINT)
        assert process.wait(patient(30)) == 130


def test_follow_goes_on_after_a_disk_was_full(tmp_path: Path) -> None:
    """A limit of the size of files, set while it runs, stands for a disk that fills up."""
    held, store = tensors(), f"file://{tmp_path}/store"
    weightsync("publish", str(save(tmp_path / "model", held)), store)
    command = [sys.executable, "-m", "weightsync.recipes.cli", "follow", store, str(tmp_path / "f")]
    with subprocess.Popen(
        [*command, "--every", "0.05"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("version 1: ")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        change(held, 0.5, 1)
        weightsync("publish", str(save(tmp_path / "model", held)), store)
        assert "File too large: give a folder to write to, with enough space" in process.stdout.readline()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert process.stdout.readline().startswith("version 2: ")
        assert content(tmp_path / "f/current") == content(tmp_path / "model")
        process.kill()
