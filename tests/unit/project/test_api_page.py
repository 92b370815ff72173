"""docs/api.md is made from docstrings."""

from __future__ import annotations

import inspect

import weightsync
from tests.api_page import PAGE, markdown, page


def test_the_page_is_what_the_script_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: bash scripts/api"


def test_each_public_name_says_what_it_is_in_one_line() -> None:
    for name in weightsync.__all__:
        if not name.startswith("_"):
            first = inspect.cleandoc(getattr(weightsync, name).__doc__).split("\n")[0]
            assert first.endswith((".", ":")), name


def test_sections_become_lists_and_code_is_fenced() -> None:
    text = "Does it::\n\n    run()\n\nThen waits.\n\nArgs:\n    rank, peer: numbers,\n        from 0: all.\n"
    assert "\n".join(markdown(text)).strip() == (
        "Does it:\n\n```\nrun()\n```\n\nThen waits.\n\n**Args:**\n\n- `rank, peer`: numbers,\n  from 0: all."
    )
