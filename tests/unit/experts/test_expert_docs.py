"""The code of docs/experts.md does what the page says."""

from __future__ import annotations

import torch

from tests.pages import run_block
from weightsync.experts.deep_ep import Buffer


def test_tokens_come_back_weighted() -> None:
    tokens = run_block("docs/experts.md", 0)["tokens"]
    factors = torch.tensor([0.5 * 2 + 0.5 * 2, 0.25 * 4 + 0.75 * 4, 4])  # experts multiply by 2, 4, 2, 4
    for rank, found in enumerate(tokens):
        assert torch.equal(found.float(), (factors * (1 + rank))[:, None].expand(3, 8))


def test_an_import_brings_deep_eps_names() -> None:
    assert run_block("docs/experts.md", 1)["Buffer"] is Buffer
