"""Shared memory: the same bytes in two processes, and nothing left behind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.forked import forking
from tests.kernel_doubles import Runtime, use_runtime
from tests.patience import patient
from weightsync.errors import PeerLostError, TransportError
from weightsync.memory import host as memory
from weightsync.memory.host import SharedBuffer, map_pages
from weightsync.protocol.handles import BufferHandle


def _own(pipe: Connection) -> None:
    buffer = SharedBuffer.create(4096)
    buffer.tensor[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    handle = buffer.handle
    pipe.send((handle.pid, handle.fd, handle.name, handle.nbytes))
    pipe.recv()
    pipe.send(int(buffer.tensor[4095]))


@pytest.fixture
def neighbour():
    context = forking()
    ours, theirs = context.Pipe()
    process = context.Process(target=_own, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(patient(60))
    yield process, BufferHandle(*ours.recv()), ours
    process.kill()
    process.join()


def test_both_processes_see_each_others_bytes(neighbour) -> None:
    _, handle, pipe = neighbour
    buffer = SharedBuffer.open(handle)
    assert buffer.tensor[:4].tolist() == [1, 2, 3, 0]
    buffer.tensor[4095] = 77
    pipe.send("look")
    assert pipe.recv() == 77
    buffer.close()


def test_the_memory_outlives_its_owner_and_cannot_be_opened_then(neighbour) -> None:
    process, handle, _ = neighbour
    buffer = SharedBuffer.open(handle)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert buffer.tensor[:3].tolist() == [1, 2, 3]
    buffer.close()
    with pytest.raises(PeerLostError, match="cannot be opened"):
        SharedBuffer.open(handle)


def test_another_files_descriptor_is_not_taken_for_the_buffer(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w+b") as file:
        file.truncate(4096)
        with pytest.raises(PeerLostError, match="another process"):
            SharedBuffer.open(BufferHandle(os.getpid(), file.fileno(), "weightsync-0", 4096))


def test_a_thousand_buffers_leave_no_descriptor_and_no_name() -> None:
    def count() -> tuple[int, int]:
        names = [name for name in os.listdir("/dev/shm") if "weightsync" in name]
        return len(os.listdir("/proc/self/fd")), len(names)

    SharedBuffer.create(1).close()
    before = count()
    for _ in range(1000):
        buffer = SharedBuffer.create(8192)
        buffer.close()
        buffer.close()
    assert count() == before


def test_an_empty_buffer_is_legal_and_an_impossible_one_is_refused() -> None:
    empty = SharedBuffer.create(0)
    assert empty.tensor.numel() == 0
    empty.close()
    with pytest.raises(TransportError, match="cannot take"):
        SharedBuffer.create(1 << 60)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return use_runtime(monkeypatch, part_nbytes=1 << 20)


@pytest.mark.parametrize("nbytes", [1, 1 << 20, (7 << 19) + 5])
def test_memory_is_page_locked_in_parts_if_it_may_be(runtime: Runtime, nbytes: int) -> None:
    whole, in_parts = SharedBuffer.create(nbytes), SharedBuffer.create(nbytes, in_parts=True)
    assert runtime.locked.pop(whole.tensor.data_ptr()) == nbytes
    end = in_parts.tensor.data_ptr()
    for at, part in sorted(runtime.locked.items()):
        assert at == end, "a gap, or two locks of one page"
        assert at // (1 << 20) == (at + part - 1) // (1 << 20), "across a border"
        end = at + part
    assert end == in_parts.tensor.data_ptr() + nbytes
    runtime.locked[whole.tensor.data_ptr()] = nbytes
    for buffer in (whole, in_parts):
        buffer.close()
        buffer.close()
    assert runtime.locked == {}


def test_memory_that_cannot_be_page_locked_is_closed_and_keeps_no_lock(runtime: Runtime) -> None:
    SharedBuffer.create(1).close()
    before, runtime.most = len(os.listdir("/proc/self/fd")), 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        SharedBuffer.create(4 << 20, in_parts=True)
    assert (runtime.locked, len(os.listdir("/proc/self/fd"))) == ({}, before)
    owned = SharedBuffer.create(4 << 20)
    mapped = SharedBuffer.open(owned.handle)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        mapped.pin(in_parts=True)
    assert [*runtime.locked] == [owned.tensor.data_ptr()]
    mapped.close()
    owned.close()
    assert (runtime.locked, len(os.listdir("/proc/self/fd"))) == ({}, before)


@pytest.mark.parametrize("advice", [memory.POPULATE_WRITE, 9999], ids=["today", "an older kernel"])
def test_new_memory_is_there_before_it_is_used(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(memory, "POPULATE_WRITE", advice)
    monkeypatch.setattr(memory, "PART_NBYTES", 3 << 20)
    before, nbytes = shared_kib(), 16 << 20
    buffer = SharedBuffer.create(nbytes)
    assert shared_kib() - before == nbytes >> 10
    assert not buffer.tensor.any()
    buffer.close()


@pytest.mark.parametrize("advice", [memory.POPULATE_READ, 9999], ids=["today", "an older kernel"])
def test_mapped_memory_is_there_before_it_is_used_and_other_threads_run_meanwhile(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(memory, "POPULATE_READ", advice)
    made: list[int] = []

    def mapped(fd: int, nbytes: int, flags: int = mmap.MAP_SHARED, prot: int = 3) -> mmap.mmap:
        made.append(flags)
        return mmap.mmap(fd, nbytes, flags, prot)

    owned = SharedBuffer.create(16 << 20)
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": mapped}))
    before, seen = shared_kib(), SharedBuffer.open(owned.handle)
    assert shared_kib() - before == 16 << 10
    assert made == [mmap.MAP_SHARED], "mmap holds the interpreter's lock while it maps pages"
    seen.close()
    owned.close()


@pytest.mark.parametrize("advice", [memory.POPULATE_READ, 9999], ids=["today", "an older kernel"])
def test_parts_are_mapped_before_they_are_read_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(memory, "POPULATE_READ", advice)
    owned = SharedBuffer.create(4 << 20)
    before, seen = shared_kib(), SharedBuffer.open(owned.handle, touch=False)
    map_pages(seen.tensor[3 : 1 << 20])
    map_pages(seen.tensor[2 << 20 : 3 << 20])
    assert (shared_kib() - before) // 1024 == (0 if advice == 9999 else 2)  # MiB; others map a little, too
    seen.close()
    owned.close()


def shared_kib() -> int:
    gc.collect()  # buffers of other tests that are waiting for it
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])
