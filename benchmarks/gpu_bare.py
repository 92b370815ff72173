"""Rates of the GPUs' links: collectives, bare and by our transport, and copies from the host."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.cluster import kill, spawn
from benchmarks.updates import WrongWeightsError, spread
from benchmarks.values import poison
from weightsync.transports import transport_class
from weightsync.transports.base import Broadcast

__all__ = ["bare_rates"]

_KINDS = (
    "ncclBroadcast",
    "torch broadcast",
    "our broadcast",
    "torch all_gather",
    "our grouped",
    "host to device",
)


class BareRank:
    """One rank of three communicators over one memory: cupy's NCCL, torch's, our transport."""

    def __init__(self, rank: int, num_ranks: int, meeting: str, nbytes: int) -> None:
        torch.cuda.set_device(0)
        self._rank, self._num_ranks = rank, num_ranks
        dist.init_process_group(
            "nccl",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=num_ranks,
            device_id=torch.device("cuda", 0),
        )
        self._data = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self._parts = self._data.chunk(num_ranks)
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._transport = transport_class("nccl")()
        self._bare: Any = None

    def offer(self) -> tuple[object, str]:
        """Return, on rank 0, the rendezvous for cupy and for our transport."""
        from weightsync.memory import cuda

        return cuda.nccl().get_unique_id(), self._transport.offer("127.0.0.1")

    def open(self, unique_id: object, rendezvous: str) -> None:
        from weightsync.memory import cuda

        self._bare = cuda.nccl().NcclCommunicator(self._num_ranks, unique_id, self._rank)
        self._transport.open(rendezvous, self._rank, self._num_ranks, 60.0)

    def run(self, kind: str, number: int) -> tuple[float, int]:
        """Return seconds from a barrier to the last byte, and the wrong bytes."""
        poison([self._data])
        roots = [0] * self._num_ranks if "broadcast" in kind.lower() else range(self._num_ranks)
        for root, part in zip(roots, self._parts, strict=True):
            if root == self._rank:
                part.fill_(number % 251)
        self._host.fill_(number % 251)
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._call(kind)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return seconds, int((self._data != number % 251).sum())

    def _call(self, kind: str) -> None:
        if kind == "ncclBroadcast":
            from weightsync.memory import cuda

            at, unsigned = self._data.data_ptr(), cuda.nccl().NCCL_UINT8
            self._bare.broadcast(at, at, self._data.numel(), unsigned, 0, self._stream.cuda_stream)
        elif kind == "torch broadcast":
            dist.broadcast(self._data, 0)
        elif kind == "host to device":  # on all GPUs at once, from separate host memory
            self._data.copy_(self._host, non_blocking=True)
        elif kind == "our broadcast":
            self._transport.start([Broadcast(self._data, 0)]).wait()
        elif kind == "torch all_gather":
            dist.all_gather_into_tensor(self._data, self._parts[self._rank])
        else:
            self._transport.start([Broadcast(part, i) for i, part in enumerate(self._parts)]).wait()


def bare_rates(gpus: Sequence[str], mib: int, num_rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row per kind of call between `gpus`, interleaved by round."""
    meeting = tempfile.mktemp(prefix="weightsync-bench-")
    nbytes = (mib << 20) // (512 * len(gpus)) * 512 * len(gpus)  # equal, aligned parts
    ranks = [spawn(BareRank, i, len(gpus), meeting, nbytes, gpu=gpu) for i, gpu in enumerate(gpus)]
    unique_id, rendezvous = ray.get(ranks[0].offer.remote())
    ray.get([rank.open.remote(unique_id, rendezvous) for rank in ranks])
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(1, num_rounds + 3):
        for kind in _KINDS:
            answers = ray.get([rank.run.remote(kind, number) for rank in ranks])
            if wrong := sum(answer[1] for answer in answers):
                raise WrongWeightsError(f"{kind}: {wrong} bytes are wrong")
            seconds[kind].append(max(answer[0] for answer in answers))
    kill(ranks)
    for kind, taken in seconds.items():
        row = spread("total", taken[2:])
        rate = nbytes / float(str(row["total ms"])) / 1e6
        yield {"call": kind, "world": len(gpus), "MiB": mib, **row, "GB/s": rate}
