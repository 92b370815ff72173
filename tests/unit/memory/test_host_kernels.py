"""Machine code of kernels outlives the process that compiled it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import patient
from weightsync.memory.kernels import host_kernels
from weightsync.memory.kernels.digest_factors import column_factors


@pytest.mark.parametrize("name", ["digest", "count_nonfinite", "copy_and_digest"])
def test_kernels_are_kept_for_other_processes(name: str) -> None:
    assert Path(getattr(host_kernels, name).stats.cache_path).is_dir()


def test_without_a_writable_folder_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(_: object) -> None:
        raise RuntimeError("cannot cache function 'digest': no locator available")

    monkeypatch.setattr(host_kernels, "_Cache", cache)
    kept: Any = host_kernels._compiled(host_kernels.digest.py_func)
    assert kept.stats.cache_path is None
    words, starts = np.arange(8, dtype=np.uint8), np.zeros(1, np.int64)
    with np.errstate(over="ignore"):
        found = kept(words, starts, 8, column_factors(1), 1)
    assert found == host_kernels.digest(words, starts, 8, column_factors(1), 1)


def test_code_that_cannot_be_kept_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(host_kernels.fcntl, "flock", flock)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    made: Any = host_kernels._compiled(host_kernels._count_words.py_func)
    assert made(np.array([7, 1, 7], np.uint8), 7) == 2
    assert Path(made.stats.cache_path).is_relative_to(tmp_path)
    assert [*tmp_path.rglob("*.nb?")] == []


COMPILES = """
import sys, time
import numpy as np
from numba.core.caching import IndexDataCacheFile
from weightsync.memory.kernels import host_kernels
from last import last

read = IndexDataCacheFile._load_index

def slowly(index):
    found = read(index)
    time.sleep(0.5)  # in which others read it, too
    return found

IndexDataCacheFile._load_index = slowly
print("ready", flush=True)
sys.stdin.readline()
for dtype in sys.argv[1:]:
    assert last(np.arange(3).astype(dtype)) == 2, dtype
print(sum(last.stats.cache_hits.values()))
"""
LAST = """
from weightsync.memory.kernels import host_kernels

@host_kernels._compiled
def last(words):
    return words[-1]
"""


def test_processes_that_compile_at_the_same_time_keep_all_that_they_made(tmp_path: Path) -> None:
    """Else one of them would later load code for other types."""
    (tmp_path / "last.py").write_text(LAST)
    path = os.pathsep.join([str(tmp_path), str(Path(host_kernels.__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}

    def begin(*dtypes: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMPILES, *dtypes]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        return process

    def end(process: subprocess.Popen[str]) -> int:
        output, _ = process.communicate("\n", timeout=patient(60))
        assert process.returncode == 0
        return int(output)

    both = [begin("uint8"), begin("float64")]
    for process in both:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    assert [end(process) for process in both] == [0, 0]
    assert end(begin("uint8", "float64")) == 2
