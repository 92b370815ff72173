"""The code of docs/shuffle.md does what the page says."""

from __future__ import annotations

import torch

from tests.pages import run_block


def test_rows_become_columns() -> None:
    held = run_block("docs/shuffle.md", 1, run_block("docs/shuffle.md", 0))["held"]
    whole = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(torch.cat(held[:2]), whole)
    assert torch.equal(torch.cat(held[2:], dim=1), whole)
