"""What a run leaves behind, and what is said where it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightsync.errors import DeadlineError
from weightsync.recipes import outcome
from weightsync.recipes.report.run_folder import RunFolder, replace_text


def full(_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails(error: BaseException) -> Callable[[], int]:
    def inside() -> int:
        raise error

    return inside


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Of a run whose logs the disk does not take."""

    @contextmanager
    def cluster(folder: RunFolder, *, threads_per_actor: int) -> Iterator[None]:
        try:
            yield
        finally:
            folder.write("logs", full)

    monkeypatch.setattr(outcome, "local_cluster", cluster)
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    ("inside", "code", "first"),
    [
        (lambda: 0, 0, "weightsync: could not write logs in "),
        (lambda: 1, 1, "weightsync: could not write logs in "),
        (fails(DeadlineError("move", ["engine e0"], 5.0)), 1, "weightsync: move: no answer within 5 s from"),
        (fails(KeyboardInterrupt()), 130, "weightsync: interrupted"),
        (fails(ZeroDivisionError("by nothing")), 1, "Traceback (most recent call last):"),
    ],
)
def test_the_outcome_of_a_run_comes_first(
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    inside: Callable[[], int],
    code: int,
    first: str,
) -> None:
    assert outcome.with_cluster(folder, 1, inside) == code
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(first)
    assert said[-1] == f"weightsync: could not write logs in {folder.path}: No space left on device"
    assert sum("could not write" in line for line in said) == 1


@pytest.mark.parametrize(("name", "code"), [("report.json", 1), ("trace.json", 1), ("report.html", 0)])
def test_what_was_asked_for_and_is_not_there_is_a_failure(folder: RunFolder, name: str, code: int) -> None:
    folder.write(name, full)
    assert outcome.with_cluster(folder, 1, lambda: 0) == code


def test_what_is_written_later_is_not_missing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("report.json", full)
    assert folder.lacks(["report.json"])
    folder.write("report.json", lambda path: replace_text(path, "{}"))
    assert not folder.complaint()
    assert (tmp_path / "report.json").read_text() == "{}"


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with pytest.raises(OSError, match="folder"):
        replace_text(tmp_path / "folder", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
