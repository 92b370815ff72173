"""What can be said of the CUDA layer on a host without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.forked import said_by
from tests.kernel_doubles import Runtime, Stream, use_runtime
from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.memory.host import PART_NBYTES
from weightsync.memory.kernels import device_kernels


@pytest.mark.parametrize("call", [cuda.nccl, cuda.nccl_versions, lambda: cuda.malloc(1)])
def test_without_cupy_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransportError, match="cuda12 or cuda13"):
        call()


def test_kernels_that_are_loaded_ahead_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(cuda, "load", names.append)
    device_kernels.load_for_16_bits()
    source = Path(device_kernels.__file__).with_name("kernels.cu").read_text().splitlines()
    assert len(names) == 5
    assert [name for name in names if f"#ifdef KERNEL_{name}" not in source] == []


def imported_for_a_digest(pipe: Connection) -> None:
    from weightsync.memory import device  # noqa: F401
    from weightsync.memory.kernels import device_kernels  # noqa: F401
    from weightsync.memory.kernels.digests import tensor_digest

    tensor_digest(torch.zeros(3), (3,))
    pipe.send([*sys.modules])


def test_the_digest_of_host_tensors_needs_no_cupy() -> None:
    assert "cupy" not in said_by(imported_for_a_digest)


class _Runtime:
    def __init__(self) -> None:
        self.unmapped: list[int] = []

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.unmapped.append(address)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    fake = _Runtime()
    addresses = iter([4096, 8192])
    monkeypatch.setattr(cuda, "_runtime", lambda: fake)
    monkeypatch.setattr(cuda, "_map", lambda handle: next(addresses))
    monkeypatch.setattr(cuda, "_opened", {})
    monkeypatch.setattr(cuda, "_exported", {b"ours": 64})
    return fake


def test_a_handle_is_mapped_once_and_unmapped_with_its_last_user(runtime: _Runtime) -> None:
    assert [cuda.open_handle(b"theirs"), cuda.open_handle(b"theirs")] == [4096, 4096]
    cuda.close_handle(b"theirs")
    assert runtime.unmapped == []
    cuda.close_handle(b"theirs")
    assert runtime.unmapped == [4096]
    assert cuda.open_handle(b"theirs") == 8192


def test_ones_own_handle_is_the_memory_itself(runtime: _Runtime) -> None:
    assert cuda.open_handle(b"ours") == 64
    cuda.close_handle(b"ours")
    assert runtime.unmapped == []


_addresses = st.builds(lambda part, near: part * PART_NBYTES + near, st.integers(1, 9), st.integers(-9, 9))


@given(target=_addresses, source=_addresses, nbytes=st.integers(0, 9) | st.integers(0, 3 * PART_NBYTES))
def test_a_copy_is_cut_where_page_locked_parts_may_meet(target: int, source: int, nbytes: int) -> None:
    copied: list[tuple[int, int, int]] = []

    class Recorded(Runtime):
        def memcpyAsync(self, target: int, source: int, nbytes: int, _: int, __: int) -> None:  # noqa: N802
            copied.append((target, source, nbytes))

    with pytest.MonkeyPatch.context() as patch:
        use_runtime(patch, Recorded(), PART_NBYTES)
        cuda.copy(target, source, nbytes, Stream())  # type: ignore[arg-type]
    at = 0
    for to, come, part in copied:
        assert (to, come) == (target + at, source + at)
        assert to // PART_NBYTES == (to + part - 1) // PART_NBYTES
        assert come // PART_NBYTES == (come + part - 1) // PART_NBYTES
        at += part
    assert at == nbytes
    assert len(copied) <= 2 * -(-nbytes // PART_NBYTES) + 2
