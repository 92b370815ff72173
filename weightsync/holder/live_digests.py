"""Digests of an engine rank's memory, taken part by part while direct copies fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightsync.memory.digests import segment_parts
from weightsync.memory.kernels import DigestTable
from weightsync.plan import Plan, Segment
from weightsync.protocol.messages import HolderDigests


class LiveDigests:
    """Digests of all that a rank holds, with a launch for each group of copies. Uses the current device.

    Kernels of one process run side by side, while those of two take turns: the rank itself could only begin
    after the last copy.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        address: Mapping[str, int],
        last: Mapping[str, int],
        num_groups: int,
    ) -> None:
        """
        Args:
            segments: the rank's, for each tensor of the plan.
            address: where the rank's buffers start, on the current device.
            last: the last group that writes each buffer.
        """
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._totals = torch.zeros((2, len(plan.tensors)), dtype=torch.int64, device="cuda")
        groups: list[list[list[Segment]]] = [[[] for _ in segments] for _ in range(num_groups)]
        for tensor, held in enumerate(segments):
            for segment in held:
                groups[last[segment.buffer]][tensor].append(segment)
        self._tables = [
            DigestTable(segment_parts(plan, its, address), len(plan.tensors), totals=self._totals)
            for its in groups
        ]

    def begin(self) -> None:
        """Start anew, before the first group."""
        with torch.cuda.stream(self._stream):
            self._totals.zero_()

    def follow(self, group: int, stream: torch.cuda.Stream) -> None:
        """Digest what a group was the last to write, after all that was started on `stream`."""
        self._stream.wait_event(stream.record_event())
        self._tables[group].launch(self._stream)

    def end(self, stream: torch.cuda.Stream) -> None:
        """Have `stream` wait for all digests."""
        stream.wait_event(self._stream.record_event())

    def result(self) -> HolderDigests:
        """Return the digests after `stream` of `end` was waited for."""
        return HolderDigests.of_live(self._totals[0].cpu().numpy().view(np.uint64))
