"""Machine code of kernels outlives the process that compiled it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightsync.memory import host_kernels
from weightsync.memory.digest_factors import column_factors


@pytest.mark.parametrize("name", ["digest", "count_nonfinite", "copy_and_digest"])
def test_kernels_are_kept_for_other_processes(name: str) -> None:
    assert Path(getattr(host_kernels, name).stats.cache_path).is_dir()


def test_without_a_writable_folder_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def njit(nogil: bool, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'digest': no locator available")
        return lambda function: function

    monkeypatch.setattr(host_kernels, "njit", njit)
    kept = host_kernels._compiled(host_kernels.digest.py_func)
    assert asked == [True, False]
    words, starts = np.arange(8, dtype=np.uint8), np.zeros(1, np.int64)
    with np.errstate(over="ignore"):
        found = kept(words, starts, 8, column_factors(1), 1)
    assert found == host_kernels.digest(words, starts, 8, column_factors(1), 1)
