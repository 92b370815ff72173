"""How fast a GPU makes and uses deltas, of its own memory and of the host's, beside a thread of the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.device_changes import CodingMemory, DeviceCoder
from weightsync.deltas.device_tiles import DeviceTiles, tile_rows, upload
from weightsync.memory import cuda
from weightsync.memory.host import SharedBuffer

__all__ = ["gpu_rows"]

DENSITIES = 0.01, 0.05, 0.3
CHUNK_NBYTES, HOST_NBYTES, THREAD_NBYTES = 1 << 30, 2 << 30, 64 << 20
TENSORS = 32 << 20, 8 << 10
"""Bytes of a matrix and of a vector, by turns."""
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of each round to make and to use deltas of `nbytes` bytes, which have `delta_nbytes`."""

    nbytes: int
    delta_nbytes: int
    make: list[float]
    use: list[float]

    def row(self, density: float, where: str) -> dict[str, object]:
        """Return a row. The first round is left out."""
        make, use = (self.nbytes / 1e9 / statistics.median(each[1:]) for each in (self.make, self.use))
        return {
            "changed %": 100 * density,
            "memory": where,
            "GB": self.nbytes / 1e9,
            "bytes %": 100 * self.delta_nbytes / self.nbytes,
            "code GB/s": make,
            "apply GB/s": use,
        }


def gpu_rows(gib: int) -> Iterator[dict[str, object]]:
    """Yield rows for each density. Versions of `gib` GiB are compared in the GPU's memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    old = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    for at in range(0, len(old), CHUNK_NBYTES):
        old[at : at + CHUNK_NBYTES].view(torch.int64).random_(generator=generator)
    for density in DENSITIES:
        new = old.clone()
        for at in range(0, len(old), CHUNK_NBYTES):
            part = new[at : at + CHUNK_NBYTES].view(torch.int16)
            part ^= (torch.rand(len(part), generator=generator, device="cuda") < density).to(torch.int16)
        yield on_device(old, new).row(density, "of the GPU")
        yield by_device(old, new).row(density, "of the host, by the GPU")
        yield by_thread(old, new).row(density, "of the host, by a thread")
    yield bare(old)


def on_device(old: torch.Tensor, new: torch.Tensor) -> Rates:
    """Versions and deltas stay in the GPU's memory: the kernels alone."""
    rows = tile_rows(spans(CHUNK_NBYTES))
    tiles, work = upload(rows), DeviceTiles(len(rows), CHUNK_NBYTES)
    makes, uses, nbytes = list[float](), list[float](), 0
    for _ in range(ROUNDS):
        memory, make, use, nbytes = old.clone(), 0.0, 0.0, 0
        for at in range(0, len(old), CHUNK_NBYTES):
            addresses = (each.data_ptr() + at for each in (old, new))
            make += seconds(work.find, tiles, *addresses)
            found = work.found()
            sizes = np.stack([found.table[2], found.table[1] * rows[:, 2]])
            table = np.concatenate([found.table, np.cumsum(sizes, 1) - sizes])
            data = torch.from_numpy(table).cuda(), memory.data_ptr() + at
            held = work.index.data_ptr(), work.values.data_ptr()
            use += seconds(work.apply, tiles, *data, *held)
            nbytes += 9 * len(rows) + len(found.index) + len(found.values)
        assert work.damaged() is None
        assert torch.equal(memory, new)
        makes.append(make)
        uses.append(use)
    return Rates(len(old), nbytes, makes, uses)


def by_device(old: torch.Tensor, new: torch.Tensor) -> Rates:
    """Versions and deltas are in page-locked memory of the host, as in a fleet."""
    coder = DeviceCoder(spans(HOST_NBYTES), CodingMemory())
    with ExitStack() as stack:
        before, after, to, sent = (
            stack.enter_context(closing(SharedBuffer.create(HOST_NBYTES, in_parts=True))).tensor
            for _ in range(4)
        )
        for host, held in ((before, old), (after, new)):  # torch copies nothing across locked parts
            seconds(cuda.copy, host.data_ptr(), held.data_ptr(), HOST_NBYTES, torch.cuda.current_stream())
        rates = Rates(HOST_NBYTES, 0, [], [])
        for _ in range(ROUNDS):
            began = time.perf_counter()
            changes = coder.between(before, after)
            nbytes = changes.nbytes
            changes.write(sent[:nbytes].numpy())
            rates.make.append(time.perf_counter() - began)
            rates.use.append(seconds(coder.rebuild, sent[:nbytes], before, to))
            assert torch.equal(to, after)
        return Rates(HOST_NBYTES, nbytes, rates.make, rates.use)


def by_thread(old: torch.Tensor, new: torch.Tensor) -> Rates:
    """Code and apply in one thread of the host, which holders without a GPU do."""
    held = spans(THREAD_NBYTES)
    before, after = (each[:THREAD_NBYTES].cpu().numpy() for each in (old, new))
    rates, memory = Rates(THREAD_NBYTES, 0, [], []), np.empty_like(before)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        changes = Changes.between(held, before, after)
        sent = np.empty(changes.nbytes, np.uint8)
        changes.write(sent)
        rates.make.append(time.perf_counter() - began)
        began = time.perf_counter()
        memory[:] = before
        Changes.decode(held, sent).apply(memory)
        rates.use.append(time.perf_counter() - began)
        assert (memory == after).all()
    return Rates(THREAD_NBYTES, len(sent), rates.make, rates.use)


def bare(device: torch.Tensor) -> dict[str, object]:
    """Return the rates of bare copies from the host to the GPU, and back."""
    with closing(SharedBuffer.create(HOST_NBYTES, in_parts=True)) as buffer:
        stream, ends = torch.cuda.current_stream(), (device.data_ptr(), buffer.tensor.data_ptr())
        there, back = (
            [seconds(cuda.copy, *each, HOST_NBYTES, stream) for _ in range(ROUNDS)]
            for each in (ends, ends[::-1])
        )
    return Rates(HOST_NBYTES, HOST_NBYTES, there, back).row(1.0, "bare copies to the GPU, and back")


def spans(nbytes: int) -> list[Span]:
    """Return bfloat16 tensors of all `nbytes` bytes."""
    found, at = list[Span](), 0
    while at < nbytes:
        size = min(TENSORS[len(found) % len(TENSORS)], nbytes - at)
        found.append(Span(at, size, 2))
        at += size
    return found


def seconds(call: Callable[..., object], *args: object) -> float:
    """Return the seconds until all that ``call(*args)`` starts has ended."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call(*args)
    torch.cuda.synchronize()
    return time.perf_counter() - began
