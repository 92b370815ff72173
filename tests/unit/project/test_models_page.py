"""docs/models.md is made from what the suite of model families found."""

from __future__ import annotations

import json

from tests.families import FAMILIES
from tests.models_page import COLUMNS, PAGE, RESULTS, page

ROWS = json.loads(RESULTS.read_text())


def test_the_page_is_what_the_script_makes() -> None:
    assert PAGE.read_text() == page(ROWS), "run: bash scripts/models"


def test_each_family_was_run_and_none_is_wrong() -> None:
    assert ROWS.keys() == FAMILIES.keys(), "run: bash scripts/models -k FAMILY"
    for family, row in ROWS.items():
        assert all(row[column] for column in COLUMNS), family
        assert "wrong" not in "".join(row.values()), family


def test_thirty_five_families_and_more_are_right_in_vllm() -> None:
    assert sum(row["vllm"] == "what its loader got" for row in ROWS.values()) >= 35
