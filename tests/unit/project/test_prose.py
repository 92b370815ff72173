"""The counts of tests/prose.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import count, files, prose, report


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("An engine and its ranks. Its own.", "its", 2),
        ("Each of them is 2 bytes each. Each rank reads each bucket.", "each", 2),
        ("Return what it holds. What is a bucket?", "what", 1),
        ("The digest is that of the trainer, not those of engines.", "that of", 2),
    ],
)
def test_words_that_stand_for_a_noun_are_counted(text: str, name: str, expected: int) -> None:
    assert count(text)[name] == expected


def test_code_is_not_prose(tmp_path: Path) -> None:
    module, page = tmp_path / "a.py", tmp_path / "a.md"
    module.write_text('"""Run `its`."""\nits = "what it does"  # a reason\n')
    page.write_text("# Use\n\n    its --what\n\n```\nits\n```\nRun it.\n")
    assert prose(module) == "Run code. a reason"
    assert prose(page) == "# Use Run it."


def test_the_report_names_totals_other_projects_and_files() -> None:
    lines = report(files(["tests/prose.py"])).splitlines()
    assert [line.split()[0] for line in lines] == ["per", "total", "httpx", "torchft", "tests/prose.py"]
