"""The kernel copies what the movers copy, here on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest


def test_the_kernel_copies_what_movers_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is imported, for the first time here
    from tests.expert_pull import compare

    compare("cpu")
