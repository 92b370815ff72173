"""Digests of the boxes that other ranks hold, too, so that replicas which differ are found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digests import BoxPart, DigestSums, box_table
from weightsync.memory.kernels.fingerprints import agreement_factors
from weightsync.memory.kernels.host_table import HostPart, HostTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Plan, RankLayout, Segment
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.protocol.messages import Compared, Digests, combine
from weightsync.sources.piece_copies import CHUNK_NBYTES, is_ready

Live = Mapping[str, torch.Tensor]

_CAST_NBYTES = 64 << 20
"""The most memory that a cast takes."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A box, its number among the rank's claims, the dtype that travels, and where the rank has it."""

    number: int
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    segment: Segment

    def held(self, live: Live) -> torch.Tensor:
        """View it in the rank's memory."""
        return segment_view(live[self.segment.buffer], self.segment)

    def part(self, held: torch.Tensor) -> BoxPart:
        return BoxPart(self.number, held, self.shape, self.box)

    def parts(self, held: torch.Tensor, nbytes: int) -> Iterator[BoxPart]:
        """Cut it into parts of at most `nbytes` bytes as they travel."""
        for box in self.box.split(nbytes // self.dtype.itemsize):
            yield BoxPart(self.number, held[box.slices(self.box)], self.shape, box)

    def host_part(self, part: BoxPart) -> HostPart:
        return HostPart(
            tensor=self.number,
            address=part.data.data_ptr(),
            box=part.box,
            shape=self.shape,
            itemsize=self.dtype.itemsize,
        )


class _Round:
    """The claims of one round: tables of those that stay where they are and need no cast, and `others`."""

    def __init__(
        self, claims: Sequence[_Claim], live: Live, strays: Collection[str], num_claims: int
    ) -> None:
        self._num_claims = num_claims
        self.others: list[_Claim] = []
        self._views: list[torch.Tensor] = []  # they keep the memory of the tables
        on_host: list[HostPart] = []
        on_gpus: dict[torch.device, list[BoxPart]] = {}
        for claim in claims:
            held = claim.held(live)
            travels = held.dtype == claim.dtype if held.is_cuda else is_ready(held, claim.dtype)
            if claim.segment.buffer in strays or not travels:
                self.others.append(claim)
                continue
            self._views.append(held)
            if held.is_cuda:
                on_gpus.setdefault(held.device, []).append(claim.part(held))
            else:
                on_host += map(claim.host_part, claim.parts(held, CHUNK_NBYTES))
        self._host = HostTable(on_host, num_claims)
        self._tables: list[tuple[torch.device, DigestTable]] = []
        for gpu, parts in on_gpus.items():
            with torch.cuda.device(gpu):
                self._tables.append((gpu, box_table(parts, num_claims)))

    def digest(self, live: Live) -> Digests:
        """Return the digests of its claims: uint64[num_claims]. `live` has the buffers of `others`."""
        for gpu, table in self._tables:
            with torch.cuda.device(gpu):  # calls arrive on threads on which another one may be current
                table.launch(torch.cuda.current_stream())
        sums = DigestSums(self._num_claims)
        with torch.no_grad():
            for claim in self.others:
                for part in claim.parts(claim.held(live), _CAST_NBYTES):
                    sums.add([replace(part, data=part.data.to(claim.dtype))])
        self._host.run_all()
        return combine([self._host.digests(), sums.result(), *(table.result() for _, table in self._tables)])


class ClaimedBoxes:
    """One epoch's boxes that a rank and others hold."""

    def __init__(
        self, plan: Plan, trainer: int, layout: RankLayout, live: Live, strays: Collection[str]
    ) -> None:
        """Prepare the digests.

        Args:
            layout: the rank's, as it is now.
            live: the tensors now, by buffer.
            strays: buffers whose tensors have to be looked up each time.
        """
        assert plan.replicas
        claims = plan.replicas.claims(trainer)
        self._factors = agreement_factors(claims, len(plan.tensors))
        held = by_tensor(plan, layout)
        segments = {(t, each.box.offset): each for t in set(claims.tensor.tolist()) for each in held[t]}
        by_round: list[list[_Claim]] = [[] for _ in range(plan.replicas.num_rounds)]
        columns = (claims.tensor, claims.offset, claims.round)
        for number, (tensor, offset, turn) in enumerate(zip(*map(np.ndarray.tolist, columns), strict=True)):
            meta = plan.tensors[tensor]
            segment = segments[tensor, tuple(offset[: len(meta.shape)])]
            dtype: torch.dtype = getattr(torch, meta.dtype)
            by_round[turn].append(_Claim(number, segment.box, meta.shape, dtype, segment))
        self._rounds = [_Round(each, live, strays, len(claims.tensor)) for each in by_round]

    def compare(self, rounds: Sequence[int], find: Callable[[], Live]) -> Compared:
        """Digest the boxes of `rounds`, as they travel. `find` returns the tensors now, by buffer."""
        asked = [self._rounds[number] for number in rounds]
        live = find() if any(each.others for each in asked) else {}
        digests = combine([each.digest(live) for each in asked])
        return Compared(digests, np.einsum("n,kn->k", digests, self._factors))
