"""Movers: how rows of tokens get from rank to rank.

`exchange` is all that a mover must have. A mover that knows a shorter way, such as a kernel that copies from
a peer's memory to the final rows, overrides `spread` and `collect` too.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from weightsync.errors import DeadlineError, TransportError
from weightsync.experts.fp8 import Fp8Rows, quantised
from weightsync.experts.routes import Routes
from weightsync.experts.routing import Routing


class Mover(ABC):
    """One rank's end of the ranks that share the experts. All ranks call the same methods in the same order.

    Attributes:
        rank: this rank.
        num_ranks: all ranks.
        device: where the ranks compare settings.
    """

    rank: int
    num_ranks: int
    device = torch.device("cpu")

    @abstractmethod
    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """Send rows of tokens to all ranks, and return the received rows [R, T, W]. Other rows are zero.

        Args:
            sent: [n, W] if all ranks get the same rows, else [R, n, W]. n may be less than T.
            sends: bool[R, T], the tokens to send to each rank, all below n.
            receives: bool[R, T], the tokens that each rank sends here.

        Raises:
            DeadlineError: names ranks that did not come.
            PeerLostError: names a rank that has ended.
            TransportError: the ranks' library failed, or an earlier call did.
        """

    def check(self) -> None:  # noqa: B027  # most movers know an error at once
        """Raise the error of an earlier call that is known only now. Does not wait."""

    def plan(self, ids: torch.Tensor, num_experts: int, alignment: int, capacity: int) -> Routes:
        """Plan rows for the expert ids of all ranks: see `Routes.plan`."""
        return Routes.plan(ids, num_experts, alignment, capacity)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts [T, W] of all ranks: [R, T, W]."""
        everything = part.new_ones((self.num_ranks, len(part)), dtype=torch.bool)
        return self.exchange(part, everything, everything)

    def spread(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Copy tokens [n, W] to rows [capacity, W]. A token travels once to a rank."""
        return routing.placed(self.exchange(x, routing.sends, routing.receives))

    def spread_fp8(self, x: torch.Tensor, routing: Routing) -> Fp8Rows:
        """Quantise tokens, and copy them to rows like `spread`."""
        return Fp8Rows.split(self.spread(quantised(x), routing), x.shape[1])

    def collect(self, rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None) -> torch.Tensor:
        """Sum each token's rows [capacity, W] to [n, W], weighted by `weights` [R, T, K].

        Each rank first sums the rows that it has. Sums are in float32 or better, and travel in the dtype of
        the rows.
        """
        sums = routing.partial_sums(rows, weights)
        parts = self.exchange(sums, routing.receives, routing.sends)[:, : routing.num_tokens]
        return parts.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


class LocalMover(Mover):
    """Ranks that are threads of one process: the reference, for tests and trials."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.num_ranks, self._meeting = rank, len(meeting.given), meeting

    @classmethod
    def ranks(cls, num_ranks: int, timeout_s: float = 60.0) -> list[LocalMover]:
        """Return the movers of all ranks."""
        meeting = _Meeting(num_ranks, timeout_s)
        return [cls(rank, meeting) for rank in range(num_ranks)]

    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """See `Mover.exchange`."""
        self._meeting.given[self.rank] = sent
        self._meeting.wait(self.rank)
        received = pulled(lambda peer: self._meeting.given[peer], self.rank, receives, sent)
        self._meeting.wait(self.rank)
        return received


class _Meeting:
    """A barrier of threads that knows which rank is missing."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.given = [torch.empty(0)] * num_ranks
        self._came, self._timeout_s = [0] * num_ranks, timeout_s
        self._barrier = threading.Barrier(num_ranks)

    def wait(self, rank: int) -> None:
        self._came[rank] += 1
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError as error:
            late = [f"rank {peer}" for peer, came in enumerate(self._came) if came < self._came[rank]]
            if late:
                raise DeadlineError("exchange", late, self._timeout_s) from error
            raise TransportError("a rank gave up: make new movers on all ranks") from error


class MessageMover(Mover):
    """Ranks of a `torch.distributed` group: gloo for tokens on CPUs, NCCL on GPUs, on one host or several.

    The CPU waits for the numbers of rows, so this cannot be captured in a CUDA graph.
    """

    def __init__(self, group: dist.ProcessGroup, device: str | torch.device = "cpu") -> None:
        """`device`: the device of the tokens, such as ``"cuda"`` for NCCL."""
        self.device = torch.device(device)
        self._group, self.rank, self.num_ranks = group, group.rank(), group.size()

    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """See `Mover.exchange`. A rank that is late is only found by the group's own time-out."""
        num, width = sent.shape[-2:]
        sends = sends[:, :num]
        packed = sent.expand(self.num_ranks, num, width)[sends]
        num_out, num_in = sends.sum(1).tolist(), receives.sum(1).tolist()
        got = packed.new_empty((sum(num_in), width))
        flat = got.view(torch.uint8), packed.view(torch.uint8)
        try:
            dist.all_to_all_single(*flat, num_in, num_out, group=self._group)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank} of {self.num_ranks}: {error}") from error
        received = sent.new_zeros((*receives.shape, width))
        received[receives] = got
        return received


def pulled(
    given: Callable[[int], torch.Tensor], rank: int, receives: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Copy rows from what each peer gave, [n, W] or [R, n, W], to [R, T, W]."""
    received = like.new_zeros((*receives.shape, like.shape[-1]))
    for peer, wanted in enumerate(receives):
        at = wanted.nonzero().flatten()
        rows = given(peer)
        received[peer].index_copy_(0, at, (rows[rank] if rows.ndim == 3 else rows).index_select(0, at))
    return received
