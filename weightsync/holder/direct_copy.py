"""Direct copies from the trainers' memory into an engine rank's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weightsync.holder.live_digests import LiveDigests
from weightsync.holder.mapped_trainers import MappedTrainers
from weightsync.memory.kernels import CopyTable
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, Reads, Segment
from weightsync.protocol.handles import DeviceHandle

_NUM_BLOCKS_BESIDE = 96
"""Thread blocks of copies that come by a link: they take no longer, and leave multiprocessors to digests.

Other copies have the device to themselves, since the engine is paused. Copy engines are 6 % faster for blocks
of 64 MiB and more, and slower for all others: `benchmarks.bench_pull`.
"""
GROUP_NBYTES, _MOST_GROUPS = 1 << 30, 16
"""Where digests follow copies, a group of these has 1 GiB or, above 16 GiB, a 16th of the bytes."""


class _Group(NamedTuple):
    """Copies that are started together: group `nth` of reads number `part`."""

    part: int
    nth: int
    first: int
    end: int


class DirectCopy:
    """The direct copies of one engine rank, made once per connect. Uses the current device."""

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        reads: Sequence[Reads],
        memory: Mapping[tuple[int, str], DeviceHandle],
        address: Mapping[str, int],
        *,
        digests: bool,
    ) -> None:
        """
        Args:
            segments: the engine rank's, for each tensor of the plan.
            reads: those of tensors that change and, if they are kept apart, those of frozen ones.
            memory: the trainers' buffers, by rank and name.
            address: where the engine rank's buffers start, on the current device.
            digests: digest meanwhile what the rank then holds, if all of that is copied directly.

        Raises:
            TransportError: a trainer's memory cannot be mapped.
        """
        self._trainers = MappedTrainers(memory)
        try:
            digests = digests and _write_all(plan, segments, reads)
            most = _MOST_GROUPS if digests else 1
            self._groups = [each for number, part in enumerate(reads) for each in _groups(number, part, most)]
            self._digests: LiveDigests | None = None
            if digests:
                last = _last_groups(reads, self._groups)
                self._digests = LiveDigests(plan, segments, address, last, len(self._groups))
            num_blocks = _NUM_BLOCKS_BESIDE if self._digests else None
            self._kernels = [
                CopyTable(
                    part.copies(self._trainers.starts, address), _bounds(number, self._groups), num_blocks
                )
                for number, part in enumerate(reads)
            ]
            self._trainers.touch()
        except BaseException:
            self.close()
            raise

    def begin(self, stream: torch.cuda.Stream, frozen: bool) -> LiveDigests | None:
        """Start the copies on `stream`, those of frozen tensors if `frozen`, without waiting for them.

        Returns the digests of all that the rank then holds, for which `stream` waits too, if there are any.
        """
        if self._digests:
            self._digests.begin()
        for number, group in enumerate(self._groups):
            if frozen or group.part == 0:
                self._kernels[group.part].launch(group.nth, stream)
            if self._digests:
                self._digests.follow(number, stream)
        if self._digests:
            self._digests.end(stream)
        return self._digests

    def close(self) -> None:
        """Unmap the trainers' memory. No copy may be running."""
        self._trainers.close()


def come_by_a_link(reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> bool:
    """Whether at least half of the bytes are read from other devices than the current one.

    Then its memory has time for digests. Trainers on this device digest at the same time, in processes of
    their own, with which kernels of this one take turns.
    """
    own = device_id(torch.device("cuda", torch.cuda.current_device()))
    near = {trainer for (trainer, _), handle in memory.items() if handle.device == own}
    total = sum((Counter(part.by_trainer()) for part in reads), Counter())
    return 2 * sum(total[trainer] for trainer in near) <= total.total()


def _groups(number: int, reads: Reads, most: int) -> list[_Group]:
    """Cut reads, in their order, into groups of about equal bytes: one at least, and `most` at most."""
    done = np.cumsum(reads.rows * reads.row_nbytes)
    total = int(done[-1]) if len(done) else 0
    num = min(most, total // GROUP_NBYTES + 1)
    ends = np.searchsorted(done, [total * each // num for each in range(1, num)], side="right").tolist()
    bounds = [0, *ends, len(reads)]
    return [_Group(number, nth, *each) for nth, each in enumerate(itertools.pairwise(bounds))]


def _bounds(number: int, groups: Sequence[_Group]) -> list[int]:
    """Return where the groups of reads `number` begin, and their end."""
    return [0, *(group.end for group in groups if group.part == number)]


def _last_groups(reads: Sequence[Reads], groups: Sequence[_Group]) -> dict[str, int]:
    """Return the number of the last group that writes each buffer."""
    return {
        reads[group.part].dst_names[buffer]: number
        for number, group in enumerate(groups)
        for buffer in np.unique(reads[group.part].dst_buffer[group.first : group.end]).tolist()
    }


def _write_all(plan: Plan, segments: Sequence[Sequence[Segment]], reads: Sequence[Reads]) -> bool:
    """Whether the reads are all that the engine rank holds."""
    held = sum(
        segment.box.numel * meta.itemsize
        for meta, its in zip(plan.tensors, segments, strict=True)
        for segment in its
    )
    return sum(part.nbytes for part in reads) == held
