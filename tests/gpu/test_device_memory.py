"""Device memory: the same bytes in two processes, counted mappings, and refusals with their remedy."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.holder.mapped_trainers import try_mapping
from weightsync.memory import cuda
from weightsync.memory.device import DeviceBuffer, export_tensors
from weightsync.protocol.handles import DeviceHandle

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def _neighbour(pipe: Connection) -> None:
    """Another process: says what it finds behind each handle, and fills that with `value`."""
    while (request := pipe.recv()) is not None:
        handles, value = request
        buffers = [DeviceBuffer.open(handle) for handle in handles]
        found = []
        for buffer in buffers:  # the others stay mapped when one of them closes
            found.append(buffer.tensor.cpu().numpy().tobytes())
            buffer.tensor.fill_(value)
            torch.cuda.synchronize()
            buffer.close()
            buffer.close()
        pipe.send(found)


@pytest.fixture(scope="module")
def pipe():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_neighbour, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(patient(30))
    process.kill()
    process.join()


def ask(pipe: Connection, handles: list[DeviceHandle], value: int) -> list[bytes]:
    torch.cuda.synchronize()
    pipe.send((handles, value))
    assert pipe.poll(patient(100))
    return pipe.recv()


def test_both_processes_see_each_others_bytes(pipe: Connection) -> None:
    buffer = DeviceBuffer.create(3_000_001)
    assert buffer.tensor.shape == (3_000_001,)
    buffer.tensor.copy_(torch.arange(3_000_001, device="cuda") % 251)
    before = buffer.tensor.cpu().numpy().tobytes()
    assert ask(pipe, [buffer.handle], 7) == [before]
    assert buffer.tensor.unique().tolist() == [7]
    assert ask(pipe, [buffer.handle, buffer.handle], 8) == [bytes([7]) * 3_000_001, bytes([8]) * 3_000_001]
    buffer.close()
    buffer.close()
    assert buffer.tensor.numel() == 0


def test_views_in_the_middle_of_torchs_allocations(pipe: Connection) -> None:
    whole = torch.arange(1 << 20, dtype=torch.int32, device="cuda")
    matrix = torch.arange(100 * 64, dtype=torch.int16, device="cuda").reshape(100, 64)
    slices = [whole[1000:2000], whole[500_001:500_003], matrix[10:20, 3:5]]
    shared = export_tensors({str(number): part for number, part in enumerate(slices)}).handles()
    handles = [*shared.values()]
    assert [handle.nbytes for handle in handles] == [4000, 8, (9 * 64 + 2) * 2]
    first = matrix.cpu().reshape(-1)[10 * 64 + 3 :]
    expected = [
        slices[0].cpu().numpy().tobytes(),
        slices[1].cpu().numpy().tobytes(),
        first[: 9 * 64 + 2].numpy().tobytes(),
    ]
    assert ask(pipe, handles, 0) == expected
    assert whole[998:1002].tolist() == [998, 999, 0, 0]
    assert whole[1998:2002].tolist() == [0, 0, 2000, 2001]


def test_memory_is_exported_alike_each_time() -> None:
    tensors = {str(number): torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for number in range(30)}
    assert export_tensors(tensors) == export_tensors(tensors)
    assert export_tensors(tensors) != export_tensors({**tensors, "0": tensors["1"]})


def test_an_empty_buffer(pipe: Connection) -> None:
    buffer = DeviceBuffer.create(0)
    assert ask(pipe, [buffer.handle], 1) == [b""]
    buffer.close()


def test_opened_in_its_own_process_it_is_the_same_memory() -> None:
    buffer = DeviceBuffer.create(4096)
    again = DeviceBuffer.open(buffer.handle)
    assert again.tensor.data_ptr() == buffer.tensor.data_ptr()
    again.close()
    buffer.tensor.fill_(3)
    assert int(buffer.tensor.sum()) == 3 * 4096
    buffer.close()


def test_it_works_from_a_thread_that_never_touched_the_device() -> None:
    sums: list[int] = []

    def work() -> None:
        buffer = DeviceBuffer.create(1000)
        buffer.tensor.fill_(2)
        sums.append(int(buffer.tensor.sum()))
        buffer.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(patient(60))
    assert sums == [2000]


def test_memory_is_tried_once_and_unmapped() -> None:
    weight = torch.ones(1 << 20, device="cuda")
    handle = export_tensors({"weight": weight}).first()
    gone = msgspec.structs.replace(handle, ipc=bytes(len(handle.ipc)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as others:
        tried = others.apply_async(try_mapping, ({"trainer 0": handle, "trainer 1": handle},))
        assert tried.get(patient(100)) == ""
        failed = others.apply_async(try_mapping, ({"trainer 0": handle, "trainer 1": gone},))
        assert failed.get(patient(100)).startswith("trainer 1: cannot map another process's memory")


def test_memory_comes_back() -> None:
    DeviceBuffer.create(1 << 20).close()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        DeviceBuffer.create(1 << 28).close()
    assert torch.cuda.mem_get_info()[0] > before - (1 << 28)


def test_impossible_sizes_and_other_devices_are_refused() -> None:
    with pytest.raises(TransportError, match=r"cannot take .* free"):
        DeviceBuffer.create(1 << 50)
    buffer = DeviceBuffer.create(16)
    elsewhere = msgspec.structs.replace(buffer.handle, device="cuda:GPU-elsewhere")
    with pytest.raises(TransportError, match=r"cuda:GPU-elsewhere.*this process is on cuda:"):
        DeviceBuffer.open(elsewhere)
    buffer.close()
    with pytest.raises(TransportError, match="no memory"):
        cuda.export([16])


def test_expandable_segments_are_refused_with_the_remedy() -> None:
    script = (
        "import torch\n"
        "from weightsync.memory.device import export_tensors\n"
        "from weightsync.errors import TransportError\n"
        "try:\n    export_tensors({'w': torch.zeros(1 << 22, device='cuda')})\n"
        "except TransportError as error:\n    print('refused:', error)\n"
    )
    setting = "expandable_segments:True"
    variables = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert "unset expandable_segments" in done.stdout
