"""Ranks whose GPUs read each other's memory: GPUs of one host with NVLink, or one GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, DeadlineError, StateError, TransportError
from weightsync.experts.fp8 import BLOCK, Fp8Rows
from weightsync.experts.movers import MessageMover, Mover
from weightsync.experts.routes import Routes
from weightsync.experts.routing import Routing
from weightsync.experts.shared_memory import gathered
from weightsync.memory.device import DeviceBuffer, PeerMemory

_ALIGNMENT = 128
_TILE = 8192
"""Elements that a program copies or sums at a time."""
_SCAN = 4096
"""Choices that a program counts at a time."""
_GROUP = 64
"""Blocks that a program quantises, and tokens that it routes, at a time."""
_WARPS = 32
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class CudaMover(Mover):
    """GPUs that read each other's memory. Kernels on the current stream do everything.

    In an exchange a rank writes tokens, or sums of rows, into memory that its peers map. Once all ranks have
    written, each rank reads what it needs, over the link once, and writes it to its final place. The CPU does
    not wait. So calls can be captured in a CUDA graph, if calls of the same sizes came before. All calls
    must be on one stream, or on streams that wait for each other.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_sms: int = 0, timeout_s: float = 60.0) -> None:
        """
        Args:
            group: the ranks, by which they find each other: gloo, or gloo and NCCL. Tokens do not use it.
            num_sms: multiprocessors that copy, at most. By default all.
            timeout_s: the longest wait for another rank in an exchange.
        """
        from weightsync.experts import kernels

        self._kernels, self._messages = kernels, MessageMover(group)
        self.rank, self.num_ranks = self._messages.rank, self._messages.num_ranks
        if self.num_ranks > kernels.MOST_RANKS:
            raise ConfigError("group", self.num_ranks, f"give at most {kernels.MOST_RANKS} ranks")
        self.device = torch.device(torch.cuda.current_device())
        all_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._grid = (min(num_sms or all_sms, all_sms),)
        self._timeout_s, self._slot_nbytes = timeout_s, 0
        self._missing = torch.zeros(1, dtype=torch.int64).pin_memory()
        table = torch.zeros(self.num_ranks + 1, dtype=torch.int64, device=self.device)
        self._here = table, self.rank, self.num_ranks
        self._own: DeviceBuffer | None = None
        self._peers = list[PeerMemory]()

    def check(self) -> None:
        """Raise DeadlineError if an exchange that the GPU has done, or given up, missed a rank."""
        if mask := int(self._missing):
            late = [f"rank {peer}" for peer in range(self.num_ranks) if mask >> peer & 1]
            raise DeadlineError("exchange", late, self._timeout_s)

    def plan(self, ids: torch.Tensor, num_experts: int, alignment: int, capacity: int) -> Routes:
        """See `Mover.plan`."""
        ids = ids.contiguous()
        num_ranks, num_tokens, top_k = ids.shape
        num_local = num_experts // num_ranks

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return ids.new_empty(shape, dtype=dtype)

        routes = Routes(
            row=new(*ids.shape),
            owner=new(*ids.shape),
            here=new(num_ranks, num_tokens, num_ranks, dtype=torch.bool),
            counts=new(num_ranks, num_local),
            offsets=new(num_ranks, num_local + 1),
            needed=new(num_ranks),
        )
        position = torch.empty_like(ids)
        self._kernels.count[(num_experts,)](
            ids, position, routes.counts, ids.numel(), _SCAN, num_warps=_WARPS
        )
        sizes = num_local, alignment, capacity
        self._kernels.place[(num_ranks,)](
            routes.counts, routes.offsets, routes.needed, *sizes, _power(num_local)
        )
        tokens = num_ranks * num_tokens
        args = tokens, num_local, num_ranks, capacity, top_k, _power(top_k), _GROUP
        made = routes.row, routes.owner, routes.here.view(torch.uint8)
        self._kernels.route[(-(-tokens // _GROUP),)](ids, position, routes.offsets, *made, *args)
        return routes

    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """See `Mover.exchange`."""
        number = torch.arange(receives.numel(), device=self.device).view(receives.shape)
        received = sent.new_zeros((*receives.shape, sent.shape[-1]))
        self._copy(sent, torch.where(receives, number, -1), received)
        return received

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `Mover.gather`."""
        number = torch.arange(self.num_ranks * len(part), device=self.device).view(self.num_ranks, -1)
        received = part.new_empty((self.num_ranks, *part.shape))
        self._copy(part, number, received)
        return received

    def spread(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `Mover.spread`."""
        rows = torch.empty(routing.capacity, x.shape[1], dtype=x.dtype, device=self.device)
        self._clear(rows, routing)
        self._copy(x, routing.mine, rows)
        return rows

    def spread_fp8(self, x: torch.Tensor, routing: Routing) -> Fp8Rows:
        """See `Mover.spread_fp8`. Needs a GPU that computes in FP8."""
        hidden, num_tokens = x.shape[1], routing.mine.shape[1]
        num_scales = -(-hidden // BLOCK)
        values = x.new_empty((routing.capacity, hidden), dtype=torch.float8_e4m3fn)
        scales = x.new_empty((routing.capacity, num_scales), dtype=torch.float32)
        scales_at = -(-num_tokens * hidden // _ALIGNMENT) * _ALIGNMENT
        self._begin(x, scales_at + num_tokens * num_scales * scales.itemsize)
        for rows in (values, scales):
            self._clear(rows, routing)
        args = x.contiguous(), len(x), scales_at, hidden, BLOCK, _GROUP
        self._kernels.put_quantised[self._grid](*self._here, *args, num_warps=_WARPS)
        self._meet()
        self._pull(routing.mine, values, 0, 0)
        self._pull(routing.mine, scales, 0, scales_at)
        return Fp8Rows(values, scales)

    def collect(self, rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None) -> torch.Tensor:
        """See `Mover.collect`."""
        mine, hidden = routing.mine, rows.shape[1]
        self._begin(rows, mine[..., 0].numel() * hidden * rows.itemsize)
        is_double, here = rows.dtype == torch.float64, routing.routes.here[self.rank].view(torch.uint8)
        block = _block(hidden)
        factors = mine if weights is None else weights.contiguous()
        args = mine, rows.contiguous(), factors, mine.shape[1], weights is not None, is_double, mine.shape[2]
        self._kernels.put_sums[self._grid](*self._here, *args, hidden, block, num_warps=_WARPS)
        self._meet()
        tokens = rows.new_empty((routing.num_tokens, hidden))
        more = here, tokens, len(tokens), mine.shape[1], self.num_ranks, is_double, hidden, block
        self._kernels.add_sums[self._grid](*self._here, *more, num_warps=_WARPS)
        return tokens

    def close(self) -> None:
        """Wait until all ranks close, and unmap the memory. Safe to call twice."""
        if self._own:
            self._meet()
            torch.cuda.synchronize(self.device)
            self._unmap()
            self._own.close()
            self._own = None

    def _copy(self, sent: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the ranks' tokens, [n, W] or [R, n, W], to `rows`, [R, T] or [R, T, K], of `out`."""
        if is_for_each := sent.ndim == 3:
            sent = torch.nn.functional.pad(sent, (0, 0, 0, rows.shape[1] - sent.shape[1]))
        row_nbytes = sent.shape[-1] * sent.itemsize
        self._begin(sent, rows.shape[1] * row_nbytes * (self.num_ranks if is_for_each else 1))
        if sent.numel():
            words = _words(sent.contiguous())
            args = words, words.numel(), _TILE
            self._kernels.put[self._grid](*self._here, *args, num_warps=_WARPS)
        self._meet()
        self._pull(rows.contiguous(), out.view(-1, out.shape[-1]), self.rank if is_for_each else 0, 0)

    def _pull(self, rows: torch.Tensor, out: torch.Tensor, plane: int, begin: int) -> None:
        words, num_tokens = _words(out), rows.shape[1]
        top_k = rows[0, 0].numel()
        width = words.shape[1]
        block = _block(width)
        group = min(_TILE // block, _power(-(-self.num_ranks * num_tokens // self._grid[0])))
        args = rows, words, num_tokens, plane, begin, top_k, width, block, group
        self._kernels.pull[self._grid](*self._here, *args, num_warps=_WARPS)

    def _clear(self, rows: torch.Tensor, routing: Routing) -> None:
        words, counts = _words(rows), routing.counts
        args = words, counts, routing.offsets, len(counts), len(rows), words.shape[1], _TILE
        self._kernels.clear[self._grid](*args, num_warps=_WARPS)

    def _meet(self) -> None:
        self._kernels.meet[(1,)](*self._here, self._missing, int(self._timeout_s * 1e9), True, num_warps=1)

    def _begin(self, given: torch.Tensor, nbytes: int) -> None:
        """Check the device and earlier exchanges, and get slots of at least `nbytes`."""
        self.check()
        if given.device != self.device:
            raise ConfigError("x", given.device, f"give tensors of this rank's device, {self.device}")
        if nbytes <= self._slot_nbytes:
            return
        if torch.cuda.is_current_stream_capturing():
            raise StateError("more memory is needed than before: make a call of this size before the capture")
        self._grow(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)

    def _grow(self, nbytes: int) -> None:
        """Replace the memory. All ranks do so in the same call, since they need as many bytes."""
        torch.cuda.synchronize(self.device)
        own, head = DeviceBuffer.create(self._kernels.HEAD_NBYTES + 2 * nbytes), self._kernels.HEAD_NBYTES
        own.tensor[:head].zero_()
        torch.cuda.synchronize(self.device)
        handles = gathered(self._messages, own.handle)  # no rank uses the earlier memory any more
        self._unmap()
        problem = ""
        try:
            for handle in handles:
                self._peers.append(PeerMemory(handle))
        except TransportError as error:
            problem = str(error)
        reached = self._messages.gather(torch.tensor([[not problem]]))
        if self._own:
            self._own.close()  # waits for the GPU, which must not wait for another rank meanwhile
        self._own = own
        self._messages.gather(reached[:, 0])
        if not bool(reached.all()):
            ranks = (~reached.flatten()).nonzero().flatten().tolist()
            raise ConfigError("group", ranks, f"these ranks cannot read all ranks' memory {problem}".strip())
        addresses = [peer.address for peer in self._peers]
        self._here[0].copy_(torch.tensor([*addresses, nbytes]))
        self._slot_nbytes = nbytes

    def _unmap(self) -> None:
        while self._peers:
            self._peers.pop().close()


def _words(rows: torch.Tensor) -> torch.Tensor:
    """View contiguous rows as the largest integers that fit."""
    nbytes = rows.shape[-1] * rows.itemsize | rows.data_ptr()
    dtype = next(word for size, word in _WORDS if nbytes % size == 0)
    return rows.view(torch.uint8).view(dtype)


def _block(width: int) -> int:
    return min(_power(width), _TILE)


def _power(number: int) -> int:
    """Return the least power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
