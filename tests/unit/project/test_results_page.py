"""benchmarks/RESULTS.md is made from the files in benchmarks/results/."""

from __future__ import annotations

from benchmarks.results import MOST_ROWS, PAGE, page


def test_the_page_is_what_the_program_makes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "run: python -m benchmarks.results"
    assert 20 < text.count("](results/") <= MOST_ROWS


def test_an_older_commit_beside_a_newer_one_gives_way() -> None:
    assert "sync-tiny-2970f4f3-2xh200" in page()
    assert "sync-tiny-9d96285b-with-2970f4f3" not in page()
