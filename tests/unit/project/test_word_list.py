"""The word list of tests/word_list.txt, and that the code and its documentation keep to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.word_list import FOLDERS, LIST, ROOT, checked_files, findings, read_list

WORDS = {"crew": "engine group", "carry_out": "run_update"}


def plant(root: Path, text: str) -> list[str]:
    """What is found in a project whose only file of code holds `text`."""
    (root / "README.md").touch()
    (root / "weightsync").mkdir()
    (root / "weightsync/one.py").write_text(text)
    return findings(root, WORDS)


def test_no_old_word_is_used() -> None:
    words = read_list(LIST.read_text())
    assert words
    assert findings(ROOT, words) == []


def test_all_code_and_documentation_is_read() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in checked_files(ROOT)}
    assert {"README.md", "docs/guide.md", "weightsync/README.md", "actors/engine.py"} <= files
    assert {file.split("/")[0] for file in files} == {*FOLDERS, "README.md"}


def test_a_planted_word_is_reported_with_its_place_and_its_replacement(tmp_path: Path) -> None:
    found = plant(tmp_path, "import os\n\ncrew = carry_out()  # the Crew's\n")
    assert found == [
        "weightsync/one.py:3: crew: use engine group",
        "weightsync/one.py:3: Crew: use engine group",
        "weightsync/one.py:3: carry_out: use run_update",
    ]


@pytest.mark.parametrize(
    "text", ["crews", "_crew", "crew_size", "EngineCrew", "MAX_CREWS", "CarryOut", "carry_outs"]
)
def test_a_word_is_found_in_names(tmp_path: Path, text: str) -> None:
    assert len(plant(tmp_path, f"x = {text}\n")) == 1


@pytest.mark.parametrize("text", ["screw", "Screws", "crewed", "carry it out", "CREWED"])
def test_other_words_are_left_alone(tmp_path: Path, text: str) -> None:
    assert plant(tmp_path, f"x = {text!r}\n") == []


@pytest.mark.parametrize(
    "line", ["crew", "crew: engine group", "Crew -> engine group", "crew -> ", "crew -> x\ncrew -> y"]
)
def test_a_line_in_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="has to be a new"):
        read_list(line)
