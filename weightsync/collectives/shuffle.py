"""Moves tensors between ranks with different layouts, and changes the layout on the way.

    plan = ShufflePlan.from_layouts(source, target, max_message_bytes=256 << 20)
    gather_send(plan, rank, memory, transport)      # on each rank of the source
    scatter_recv(plan, rank, memory, transport)     # on each rank of the target

Both sides derive the same sequence of segments from the same plan. The sender gathers segments into a few
large messages; the receiver scatters messages to segments. The two primitives over segment descriptors are
FUSCO's (https://arxiv.org/abs/2512.22036), which moves tokens to experts. Here segments are 2-D, as sharded
weights are, and a plan is made once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.errors import ConfigError, PlanError, StateError
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.memory.tensors import extent_nbytes
from weightsync.plan.broadcast.buckets import RUN_ALIGN
from weightsync.plan.cross_host.shuffle import Lane, Messages, ShufflePlan, starts
from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.copies import Copies, concatenated
from weightsync.plan.layout.layout import Int32, Int64
from weightsync.plan.layout.segment import suggest
from weightsync.transports import Pending, Transport
from weightsync.transports.base import Op, Recv, Send

Memory = Mapping[str, torch.Tensor]

_NEVER = np.iinfo(np.int64).max
_SLOTS = 2
_NUM_BLOCKS = 64
"""Thread blocks of a copy: close to full speed, and NCCL still finds free multiprocessors."""


def gather_send(plan: ShufflePlan, rank: int, memory: Memory, transport: Transport) -> None:
    """Send this rank's part of a plan, once. Returns when all is sent.

    The target's ranks call `scatter_recv` at the same time. Use `Shuffle` if this rank also receives, or
    sends more than once. Staging memory on the device is at most twice ``plan.max_message_bytes``.

    Args:
        plan: the same plan on every rank.
        rank: this process's rank in `transport`.
        memory: the buffers of this rank's layout by name, of any shape and dtype, all on the device of
            `transport`. Bytes are read without a cast.
        transport: an open transport; see `weightsync/transports/README.md`.

    Raises:
        ConfigError: `rank` does not send in this plan, or `memory` is on several devices.
        PlanError: names a buffer that `memory` lacks, or that is too small.
        StateError: this rank also receives.
        TransportError: a rank is lost or late. Bytes received on any rank must not be used.
    """
    _check_role("sends", rank, range(plan.num_senders))
    if rank in plan.receivers:
        raise StateError(f"rank {rank} also receives: give Shuffle both memories, and call its run")
    Shuffle(plan, rank, transport, source=memory).run()


def scatter_recv(plan: ShufflePlan, rank: int, memory: Memory, transport: Transport) -> None:
    """Receive this rank's part of a plan, once. Returns when the whole part is in `memory`.

    The source's ranks call `gather_send` at the same time. Both need as much staging memory.

    Args:
        plan: the same plan on every rank.
        rank: this process's rank in `transport`.
        memory: the buffers of this rank's layout by name, which are written.
        transport: an open transport.

    Raises:
        ConfigError: `rank` does not receive in this plan, or `memory` is on several devices.
        PlanError: names a buffer that `memory` lacks, or that is too small.
        StateError: this rank also sends.
        TransportError: a rank is lost or late. `memory` may hold old and new bytes.
    """
    _check_role("receives", rank, plan.receivers)
    if rank < plan.num_senders:
        raise StateError(f"rank {rank} also sends: give Shuffle both memories, and call its run")
    Shuffle(plan, rank, transport, target=memory).run()


class Shuffle:
    """One rank's part of a plan, prepared once and run any number of times.

    Staging memory is at most twice ``plan.max_message_bytes`` for sending and as much for receiving. On a GPU
    one kernel launch packs a round, one unpacks it, and one makes the copies within the rank. Transposed
    tensors need another launch.

    Args:
        plan: the same plan on every rank.
        rank: this process's rank in `transport`.
        transport: an open transport.
        source: the buffers of this rank's layout in the source by name; only if the rank sends.
        target: the same for the target; only if the rank receives. No byte may be both read and written.

    Raises:
        ConfigError: `source` or `target` is missing, not needed, or on several devices.
        PlanError: names a buffer that is missing or too small.
    """

    def __init__(
        self,
        plan: ShufflePlan,
        rank: int,
        transport: Transport,
        *,
        source: Memory | None = None,
        target: Memory | None = None,
    ) -> None:
        _check_given(rank, "source", source, rank < plan.num_senders)
        _check_given(rank, "target", target, rank in plan.receivers)
        source, target = source or {}, target or {}
        packs, receives = [lane for lane in plan.sends(rank) if not lane.hop], plan.receives(rank)
        local = [reads for number, reads in plan.local if number == rank]
        sent, received = ([lane.messages.reads for lane in lanes] for lanes in (packs, receives))
        src = _Side("source", source, map(_Used.source, [*sent, *local]))
        dst = _Side("target", target, map(_Used.target, [*received, *local]))
        self._transport, self.num_rounds = transport, plan.num_rounds
        self._device = _device([*source.values(), *target.values()])
        self._relays = [lane for lane in plan.sends(rank) if lane.hop]
        self._out = _Window([(lane.receiver, lane) for lane in packs], self.num_rounds, self._device)
        self._in = _Window([(lane.sender, lane) for lane in receives], self.num_rounds, self._device)
        self._memory = [*source.values(), *target.values(), self._out.staging, self._in.staging]
        self._pack = self._copier(
            self._out.copies(lambda moved, n, at: moved.pack(n, src.starts(moved.reads.src_names), at))
        )
        self._unpack = self._copier(
            self._in.copies(lambda moved, n, at: moved.unpack(n, at, dst.starts(moved.reads.dst_names)))
        )
        own = {(rank, name): address for name, address in src.address.items()}
        self._local = self._copier([[reads.copies(own, dst.address) for reads in local]])

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory on the device, for sending and receiving."""
        return self._out.staging.numel() + self._in.staging.numel()

    def run(self) -> None:
        """Send and receive all rounds. Every rank of the plan must call it.

        On a GPU this runs on the current stream, and waits for the stream at the end.

        Raises:
            TransportError: a rank is lost or late. `target` may hold old and new bytes.
        """
        self._go(self.num_rounds, lambda: True)
        self._synchronize()

    def move(self, wanted: Callable[[], bool]) -> None:
        """Send and receive all rounds without waiting for a GPU's current stream.

        Args:
            wanted: called before each write to this rank's target, which is skipped if it returns False.
                The other ranks still receive their part.

        Raises:
            TransportError: a rank is lost or late. `target` may hold old and new bytes.
        """
        self._go(self.num_rounds, wanted)

    def rehearse(self) -> None:
        """Use every path once, as `run` does, without writing to the target."""
        self._go(min(self.num_rounds, _SLOTS), lambda: False)
        self._synchronize()

    def _go(self, num_rounds: int, wanted: Callable[[], bool]) -> None:
        before: Pending | None = None
        for round in range(num_rounds):
            self._pack(round)
            if self._relays:  # the round to pass on must have arrived
                self._finish(round - 1, before, wanted)
                before = None
            ops = [*self._out.ops(Send, round), *self._passed_on(round), *self._in.ops(Recv, round)]
            pending = self._transport.start(ops) if ops else None
            self._finish(round - 1, before, wanted)
            before = pending
        if wanted():
            self._local(0)  # during the last round's transfer
        self._finish(num_rounds - 1, before, wanted)

    def _passed_on(self, round: int) -> list[Op]:
        before = {lane.bundle: data for lane, data in self._in.messages(round - 1)} if self._relays else {}
        return [Send(before[lane.bundle], lane.receiver) for lane in self._relays if lane.bundle in before]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _finish(self, round: int, pending: Pending | None, wanted: Callable[[], bool]) -> None:
        if pending:
            pending.wait()
            if wanted():
                self._unpack(round)

    def _copier(self, groups: Sequence[Sequence[Copies]]) -> Callable[[int], None]:
        """Return a function that runs the copies of a group, given the group's number."""
        bounds = [0, *itertools.accumulate(sum(map(len, group)) for group in groups)]
        if not bounds[-1]:
            return lambda _: None
        copies = concatenated([each for group in groups for each in group])
        if self._device.type == "cpu":
            return AddressCopies(copies, bounds, self._memory).run
        with torch.cuda.device(self._device):
            table = CopyTable(copies, bounds, _NUM_BLOCKS)
        return lambda group: _launch(table, group, self._device)


class _Window:
    """Staging memory for sending or receiving: two slots, one round of messages each."""

    def __init__(self, lanes: Sequence[tuple[int, Lane]], num_rounds: int, device: torch.device) -> None:
        """`lanes` has (other rank, lane) pairs."""
        self._rounds: list[list[_Placed]] = []
        slot_nbytes = 0
        for round in range(num_rounds):
            at, placed = 0, []
            for peer, lane in lanes:
                number = round - lane.hop
                if 0 <= number < lane.messages.num_rounds:
                    nbytes = int(lane.messages.nbytes[number])
                    placed.append(_Placed(peer, lane, number, at, nbytes))
                    at += -(-nbytes // RUN_ALIGN) * RUN_ALIGN
            self._rounds.append(placed)
            slot_nbytes = max(slot_nbytes, at)
        self._slot_nbytes = slot_nbytes
        num_slots = min(_SLOTS, num_rounds)
        self.staging = torch.empty(num_slots * slot_nbytes, dtype=torch.uint8, device=device)

    def copies(self, make: Callable[[Messages, int, int], Copies]) -> list[list[Copies]]:
        """Return ``make(messages, number, address)`` for each message of each round."""
        base = self.staging.data_ptr()
        return [
            [make(each.lane.messages, each.number, base + self._slot(round) + each.at) for each in placed]
            for round, placed in enumerate(self._rounds)
        ]

    def ops(self, kind: type[Send] | type[Recv], round: int) -> list[Op]:
        return [kind(self._data(round, each), each.peer) for each in self._rounds[round]]

    def messages(self, round: int) -> list[tuple[Lane, torch.Tensor]]:
        """Return lanes with their messages' bytes in a round; empty for negative rounds."""
        return [(each.lane, self._data(round, each)) for each in (self._rounds[round] if round >= 0 else ())]

    def _data(self, round: int, placed: _Placed) -> torch.Tensor:
        at = self._slot(round) + placed.at
        return self.staging[at : at + placed.nbytes]

    def _slot(self, round: int) -> int:
        return round % _SLOTS * self._slot_nbytes


@dataclass(frozen=True, slots=True)
class _Placed:
    """A message's place in a slot."""

    peer: int
    lane: Lane
    number: int
    at: int
    nbytes: int


def _launch(table: CopyTable, group: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        table.launch(group, torch.cuda.current_stream())


def _check_role(verb: str, rank: int, ranks: Collection[int]) -> None:
    if rank not in ranks:
        raise ConfigError("rank", rank, f"in this plan {verb} one of {', '.join(map(str, ranks))}")


def _check_given(rank: int, side: str, memory: Memory | None, needed: bool) -> None:
    if needed and memory is None:
        raise ConfigError(side, None, f"rank {rank} is of the {side}: give the buffers that its layout names")
    if memory is not None and not needed:
        raise ConfigError(side, sorted(memory), f"rank {rank} is not of the {side}: leave it out")


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    found = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    if len(found) > 1 or next(iter(found)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, found)))
        raise ConfigError("memory", names, "give buffers of one device, the host's or a GPU's")
    return found.pop()


@dataclass(frozen=True, slots=True, eq=False)
class _Used:
    """Bytes that reads use on one side: `low[i]` to `high[i]` of buffer ``names[buffer[i]]``."""

    names: tuple[str, ...]
    buffer: Int32
    low: Int64
    high: Int64

    @classmethod
    def source(cls, reads: Reads) -> _Used:
        high = reads.src + (reads.rows - 1) * reads.src_pitch + reads.row_nbytes
        return cls(reads.src_names, reads.src_buffer, reads.src, high)

    @classmethod
    def target(cls, reads: Reads) -> _Used:
        high = reads.dst + (reads.rows - 1) * reads.dst_pitch + reads.row_nbytes
        return cls(reads.dst_names, reads.dst_buffer, reads.dst, high)


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """The used bytes of each buffer of `names`: from `low` to `high`, or -1 for unused buffers."""

    names: tuple[str, ...]
    low: Int64
    high: Int64

    @classmethod
    def none(cls, names: tuple[str, ...]) -> _Spans:
        return cls(names, np.full(len(names), _NEVER), np.full(len(names), -1))

    def add(self, used: _Used) -> None:
        np.minimum.at(self.low, used.buffer, used.low)
        np.maximum.at(self.high, used.buffer, used.high)


class _Side:
    """One side's memory, with all used buffers.

    Attributes:
        address: the start of each buffer by name.
    """

    def __init__(self, side: str, memory: Memory, used: Iterable[_Used]) -> None:
        """Raises PlanError for a buffer that `memory` lacks, or that is too small there."""
        self.address = {name: tensor.data_ptr() for name, tensor in memory.items()}
        spans: dict[int, _Spans] = {}  # by object: to compare thousands of names takes long
        for each in used:
            if id(each.names) not in spans:
                spans[id(each.names)] = _Spans.none(each.names)
            spans[id(each.names)].add(each)
        for its in spans.values():
            for number in np.flatnonzero(its.high >= 0).tolist():
                low, high = int(its.low[number]), int(its.high[number])
                _check_fits(side, memory, its.names[number], low, high)
        self._starts = {key: starts(its.names, self.address) for key, its in spans.items()}

    def starts(self, names: tuple[str, ...]) -> Int64:
        """Return the addresses of a plan's `names`, with 0 for unused buffers."""
        return self._starts[id(names)]


def _check_fits(side: str, memory: Memory, name: str, low: int, high: int) -> None:
    if name not in memory:
        raise PlanError(name, f"the {side} memory has no such buffer; {suggest(name, memory)}")
    nbytes = extent_nbytes(memory[name])
    if low < 0 or high > nbytes:
        raise PlanError(
            name,
            f"the plan uses its bytes {low} to {high}, the {side} memory has {nbytes}; give the "
            "buffer that the layout describes",
        )
