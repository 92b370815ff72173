"""The code of README and docs: each block is run by a test, or this says why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, pages

BY_HAND = "needs a GPU, or a machine of its own"
RUN_BY = {
    "README.md": ["tests/actors/test_commands.py"],
    "docs/checkpoints.md": ["tests/actors/test_checkpoints.py"],
    "docs/clusters.md": ["tests/unit/project/test_kubernetes.py"] * 5,
    "docs/deltas.md": ["tests/unit/recipes/test_recipes_cli.py"],
    "docs/faults.md": ["tests/actors/test_commands.py"],
    "docs/guide.md": ["tests/unit/project/test_packaging.py", BY_HAND],
    "docs/performance.md": ["tests/unit/recipes/test_recipes_cli.py"],
    "docs/servers.md": ["tests/contract/test_server.py"] * 2,
    "docs/stores.md": ["tests/unit/stores/test_store_commands.py"],
    "docs/trl.md": ["tests/contract/test_trl.py"],
    "docs/verl.md": ["tests/contract/test_verl.py"],
}
"""The tests of commands in ``sh`` blocks."""

NOT_RUN: Mapping[tuple[str, int], str] = {}
"""Python blocks, by page and number, that no test can run, and why."""


@pytest.mark.parametrize(
    "page", sorted({"README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))})
)
def test_each_block_of_commands_is_run_by_a_test_that_is_there(page: str) -> None:
    named = RUN_BY.get(page, [])
    assert len(blocks(page, "sh")) == len(named), f"say in RUN_BY which test runs each block of {page}"
    assert all((ROOT / test).exists() for test in named if test != BY_HAND)


def test_each_block_of_python_is_run_by_a_test() -> None:
    """On any page: `run_block` is called with the page and the number of the block."""
    there = {
        (page, number)
        for page in (str(path.relative_to(ROOT)) for path in pages())
        for number in range(len(blocks(page)))
    }
    run = {each for path in (ROOT / "tests").rglob("*.py") for each in calls_of_run_block(path.read_text())}
    assert len(there) > 25
    assert there - run - NOT_RUN.keys() == set(), (
        "run these by tests.pages.run_block, or say why not in NOT_RUN"
    )
    assert (run | NOT_RUN.keys()) - there == set(), "these are not there"
    assert run & NOT_RUN.keys() == set()


def test_only_literal_calls_of_run_block_count() -> None:
    text = 'run_block("README.md", 1, names)\nrun("README.md", 2)\n# run_block("README.md", 3)\n'
    assert calls_of_run_block(text) == {("README.md", 1)}


def calls_of_run_block(text: str) -> set[tuple[str, int]]:
    """Return the literal pages and numbers with which a test's file calls `run_block`."""
    if "run_block(" not in text:
        return set()
    found = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
    return {
        (call.args[0].value, call.args[1].value)  # type: ignore[attr-defined]
        for call in found
        if isinstance(call.func, ast.Name) and call.func.id == "run_block"
    }


@cache
def _python_files() -> list[str]:
    folders = ("actors", "benchmarks", "examples", "recipes", "tests", "weightsync")
    found = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    return [path.as_posix() for path in found]


def missing_files(page: Path, text: str) -> list[str]:
    """What `text` links to or calls a Python file, and the repository does not have."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    names = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text)
    known = _python_files()
    gone = [link for link in links if not (page.parent / link).exists()]
    return gone + [name for name in names if not any(path.endswith(f"/{name}") for path in known)]


def test_files_that_pages_name_are_there() -> None:
    known = pages()
    assert len(known) > 15
    assert {str(page): gone for page in known if (gone := missing_files(page, page.read_text()))} == {}
    assert missing_files(ROOT / "README.md", "[a](gone.md), [b](README.md), `gone.py`") == [
        "gone.md",
        "gone.py",
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_that_pages_name_are_there() -> None:
    found = [
        (page, page.parent / link if link else page, anchor)
        for page in pages()
        for link, anchor in re.findall(
            r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
        )
    ]
    assert len(found) > 50
    assert [(str(page), anchor) for page, target, anchor in found if anchor not in anchors(target)] == []


def rows_without_tests(text: str) -> dict[str, list[str]]:
    """Return rows of "What verified means" that name no test, or tests that are not there, with these."""
    section = text.split("## What verified means")[1].split("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    found = {}
    for row in rows:
        named = re.findall(r"\[`(test_\w+)`\]\(\.\./\.\./(tests/[\w/]+\.py)\)", row)
        gone = [name for name, path in named if f"def {name}(" not in (ROOT / path).read_text()]
        if gone or not named:
            found[row.split("|")[1].strip()] = gone
    return found


def test_what_verified_means_is_shown_by_tests_that_are_there() -> None:
    text = (ROOT / "docs/internals/faults.md").read_text(encoding="utf-8")
    assert rows_without_tests(text) == {}
    assert rows_without_tests(text.replace("`test_each_byte_counts`", "`test_gone`")) == {
        "frozen drafts": ["test_gone"]
    }


def test_commands_have_one_form_and_pages_say_what_it_needs() -> None:
    said = {page: page.read_text(encoding="utf-8") for page in pages()}
    assert [str(page) for page, text in said.items() if "bin/weightsync" in text] == []
    for name in ("README.md", "recipes/README.md"):
        first = re.search(r"^weightsync (run|report|plan|doctor) ", said[ROOT / name], re.M)
        assert first
        assert ". .venv/bin/activate" in said[ROOT / name][: first.start()], f"{name} does not say it in time"
