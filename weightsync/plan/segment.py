"""What one rank declares: which boxes of which tensors lie where in its memory."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.plan.box import Box
from weightsync.plan.tensors import TensorMeta

__all__ = ["MAPPED", "RankLayout", "Segment"]

MAPPED = "mapped"


@dataclass(frozen=True, slots=True)
class Segment:
    """Where `box` of `tensor` lies in one rank's memory.

    `byte_offset` counts from the first byte of `buffer` to the box's first element, `strides`
    are bytes per dimension of the box. Several segments may share one buffer (a fused module).
    """

    tensor: str
    box: Box
    buffer: str
    byte_offset: int
    strides: tuple[int, ...]

    # A dataclass with slots comes back field by field, which takes twice as long; there are 20,000 of them.
    def __reduce__(self) -> tuple[type[Segment], tuple[str, Box, str, int, tuple[int, ...]]]:
        return Segment, (self.tensor, self.box, self.buffer, self.byte_offset, self.strides)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank declares.

    Attributes:
        tensors: the tensors it knows, by the checkpoint's names; ranks may know different ones.
        segments: the boxes it holds.
        tied: (alias, canonical) pairs. An alias is the same memory, so it has no segments.
        buffers: the live parameters that the segments write, with their local shapes. If there
            are none, this rank's live coverage is not checked (an engine that repacks).
        padding: (buffer, byte_offset, nbytes) that no tensor reaches and that stays as it is.
        device: where the buffers lie: ``cuda:<UUID>``, or empty for host memory; `MAPPED` for host
            memory that the holder maps, and that is not published.
    """

    tensors: tuple[TensorMeta, ...]
    segments: tuple[Segment, ...]
    tied: tuple[tuple[str, str], ...] = ()
    buffers: tuple[TensorMeta, ...] = ()
    padding: tuple[tuple[str, int, int], ...] = ()
    device: str = ""
