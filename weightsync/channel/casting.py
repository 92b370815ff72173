"""Casts received pieces to an engine rank's dtypes, with digests of both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.channel.sink import PieceView, Sink
from weightsync.memory.kernels.digests import BoxPart, box_digests
from weightsync.plan import Plan, RankLayout
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.protocol.messages import Digests


class Casting:
    """Casts of a rank, with digests before and after.

    A `Sink` gets pieces in the rank's dtypes, and digests the rank's memory. From these digests `of_received`
    computes the digests in the trainers' dtypes. They equal the trainers' digests if the right elements came
    and the rank holds them, cast.
    """

    def __init__(self, plan: Plan, layout: RankLayout) -> None:
        """`layout` is the rank's layout of the tensors of `plan`."""
        dtypes = {meta.name: meta.dtype for meta in layout.tensors}
        self._plan = plan
        self._dtype: dict[int, torch.dtype] = {
            tensor: getattr(torch, dtypes[meta.name])
            for tensor, meta in enumerate(plan.tensors)
            if dtypes.get(meta.name, meta.dtype) != meta.dtype
        }
        self._segments = by_tensor(plan, layout)
        self._received, self._cast = np.zeros((2, len(plan.tensors)), np.uint64)
        self._came: set[int] = set()

    def begin(self) -> None:
        """Start a load. Tensors that do not come, such as frozen tensors, keep their digests."""
        self._came.clear()

    def cast(self, pieces: Sequence[PieceView]) -> list[PieceView]:
        """Return a bucket's pieces in the rank's dtypes. Digests the rank's boxes of cast pieces."""
        done, before, after = [], list[BoxPart](), list[BoxPart]()
        for tensor, box, data in pieces:
            if (dtype := self._dtype.get(tensor)) is None:
                done.append((tensor, box, data))
                continue
            made = data.to(dtype)
            done.append((tensor, box, made))
            self._forget(tensor)
            shape = self._plan.tensors[tensor].shape
            for segment in self._segments[tensor]:
                if part := box.intersect(segment.box):
                    index = part.slices(box)
                    before.append(BoxPart(tensor, data[index], shape, part))
                    after.append(BoxPart(tensor, made[index], shape, part))
        if before:
            num_tensors = len(self._plan.tensors)
            self._received += box_digests(before, num_tensors)
            self._cast += box_digests(after, num_tensors)
        return done

    def of_received(self, held: Digests) -> Digests:
        """Convert the digests `held` of the rank's memory to the dtypes that travel.

        If a tensor in memory equals the cast pieces, its result is the digest of the received pieces.
        Otherwise the result differs from this digest.
        """
        wanted = [*self._dtype]
        found: Digests = held.copy()
        found[wanted] += self._received[wanted] - self._cast[wanted]
        return found

    def _forget(self, tensor: int) -> None:
        if tensor not in self._came:
            self._came.add(tensor)
            self._received[tensor] = self._cast[tensor] = 0


class CastingSink:
    """A Sink that casts pieces for another Sink.

    Only frozen tensors do not come, since no holder writes the rank's memory.
    """

    def __init__(self, sink: Sink, casting: Casting) -> None:
        self._sink, self._casting = sink, casting
        self.written, self.finish = sink.written, sink.finish
        casting.begin()

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Cast a bucket's pieces and pass them on."""
        self._sink.take(bucket, self._casting.cast(pieces))

    def digests(self) -> Digests:
        """Return the other sink's digests in the dtypes that travel."""
        return self._casting.of_received(self._sink.digests())
