"""The code of README and docs: each block is run by a test, or this says why not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG
from weightsync.driver.controller import Controller
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.holder.holder import Holder
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalEngine, LocalPeer, LocalTrainer

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "weightsync", "recipes", "benchmarks", "configs", "examples", "tests")
BLOCK = re.compile(r"^```(python|sh)\n(.+?)^```", re.S | re.M)

BY_HAND = "needs a GPU, or a machine of its own"
RUN_BY = {
    "README.md": [
        "tests/actors/test_quickstart.py",
        "tests/actors/test_pages.py",
        BY_HAND,
        "tests/gpu/test_vllm_end_to_end.py",
        "tests/unit/recipes/test_recipes_cli.py",
        "tests/actors/test_chaos.py",
    ],
    "docs/adapters.md": ["tests/actors/test_adapters.py"],
    "docs/checkpoints.md": ["tests/actors/test_checkpoints.py"] * 3,
    "docs/components.md": [
        "tests/actors/test_models.py",
        "tests/actors/test_drafts.py",
        "tests/actors/test_drafts_in_training.py",
        "tests/actors/test_dtypes_in_one_fleet.py",
    ],
    "docs/extending.md": ["tests/unit/project/test_docs.py"] * 2,
    "docs/faults.md": ["tests/actors/test_pages.py"] * 2,
    "docs/performance.md": ["tests/actors/test_pages.py"] * 3,
    "docs/guide.md": ["tests/actors/test_turns.py"]
    + ["tests/contract/test_vllm_transfer.py"] * 2
    + [BY_HAND],
    "docs/quantised.md": ["tests/actors/test_quantised_engines.py"],
    "docs/shuffle.md": ["tests/contract/test_shuffle_docs.py"],
    "docs/trainers.md": ["tests/unit/sources/test_trainers_page.py"] * 7,
}


def blocks(page: str) -> list[str]:
    return [code for _, code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "page", sorted({"README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))})
)
def test_each_block_of_a_page_is_run_by_a_test_that_is_there(page: str) -> None:
    named = RUN_BY.get(page, [])
    assert len(blocks(page)) == len(named), f"say in RUN_BY which test runs each block of {page}"
    assert all((ROOT / test).exists() for test in named if test != BY_HAND)


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
    pages = _pages()
    assert len(pages) > 15
    assert {str(page): gone for page in pages if (gone := missing_files(page, page.read_text()))} == {}
    assert missing_files(ROOT / "README.md", "[a](gone.md), [b](README.md), `gone.py`") == [
        "gone.md",
        "gone.py",
    ]


def rows_without_tests(text: str) -> dict[str, list[str]]:
    """Return rows of "What verified means" that name no test, or tests that are not there, with these."""
    section = text.split("## What verified means")[1].split("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    found = {}
    for row in rows:
        named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", row)
        gone = [name for name, path in named if f"def {name}(" not in (ROOT / path).read_text()]
        if gone or not named:
            found[row.split("|")[1].strip()] = gone
    return found


def test_what_verified_means_is_shown_by_tests_that_are_there() -> None:
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    assert rows_without_tests(text) == {}
    assert rows_without_tests(text.replace("`test_each_byte_counts`", "`test_gone`")) == {
        "frozen drafts": ["test_gone"]
    }


def _pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def test_commands_have_one_form_and_pages_say_what_it_needs() -> None:
    said = {page: page.read_text(encoding="utf-8") for page in _pages()}
    assert [str(page) for page, text in said.items() if "bin/weightsync" in text] == []
    for name in ("README.md", "recipes/README.md"):
        first = re.search(r"^weightsync (run|report|plan|doctor) ", said[ROOT / name], re.M)
        assert first
        assert ". .venv/bin/activate" in said[ROOT / name][: first.start()], f"{name} does not say it in time"


def test_an_engine_in_thirty_lines_is_updated_and_verified() -> None:
    names = run("docs/extending.md", 0)
    engine, model = names["SumEngine"](), nn.Linear(6, 4, bias=False)

    def train() -> torch.Tensor:
        with torch.no_grad():
            return model.weight.random_(-9, 9)

    def check(weight: torch.Tensor, version: int) -> None:
        assert torch.equal(engine.weight, weight)
        assert engine.generate([[1, 2]], {}).tokens == [[int(weight.sum()) * 3]]
        assert engine.serving() == version

    update_twice(LocalTrainer(ModuleSource(model)), engine, train, check)


def test_a_source_in_thirty_lines_is_sent_and_verified() -> None:
    shard = run("docs/extending.md", 1)["ArrayTrainer"]()
    arrays = shard.source.arrays
    engine = DictEngine("e0", {"weight": torch.zeros(4, 6)})

    class Sync:
        """The trainer's actor without Ray."""

        layout, attach = shard.sync_layout, shard.sync_attach
        outline = shard.sync_outline
        publish, digests = shard.sync_publish, shard.sync_digests
        close = shard.source.close

    def train() -> torch.Tensor:
        arrays["weight"][...] = np.random.default_rng().integers(-9, 9, (4, 6))
        return torch.from_numpy(arrays["weight"])

    def check(weight: torch.Tensor, version: int) -> None:
        assert torch.equal(engine.tensors["weight"], weight)

    update_twice(LocalPeer(Sync), engine, train, check)


def run(page: str, number: int) -> dict[str, Any]:
    """The names of a page's code block, run."""
    names: dict[str, Any] = {}
    exec(compile(blocks(page)[number], page, "exec"), names)
    return names


def update_twice(
    trainer: Any, engine: Any, train: Callable[[], torch.Tensor], check: Callable[[torch.Tensor, int], None]
) -> None:
    holders = [Holder(f"holder {i}", "127.0.0.1") for i in range(2)]
    members = {"e0": EngineMember(LocalEngine(engine), (1,))}
    controller = Controller(CONFIG, Fleet([(trainer, 0)], members, [LocalPeer(h) for h in holders]))

    async def work() -> None:
        await controller.connect()
        for version in (1, 2):
            weight = train()
            assert (await controller.update(version)).verified
            check(weight, version)

    try:
        asyncio.run(work())
    finally:
        for part in (trainer.target, engine, *holders):
            part.close()
