"""The GPU's kernels do what the CPU's movers do, here by Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.gpu import own_process


def test_interpreted_kernels_move_and_sum_like_the_movers_of_cpus() -> None:
    pytest.importorskip("triton")
    own_process.run("tests.expert_kernels", "drops", "FP8, with a short block", env={"TRITON_INTERPRET": "1"})
