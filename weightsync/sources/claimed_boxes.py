"""Digests of the boxes that other ranks hold, too, so that replicas which differ are found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory.digests import BoxPart, DigestSums, box_table
from weightsync.memory.fingerprints import agreement_factors
from weightsync.memory.host_table import HostPart, HostTable
from weightsync.memory.kernels import DigestTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Plan, RankLayout, Segment
from weightsync.plan.plan import by_tensor
from weightsync.plan.replicas import NUM_ROUNDS
from weightsync.protocol.messages import Compared, Digests, combine
from weightsync.sources.piece_copies import CHUNK_NBYTES, is_ready

Live = Mapping[str, torch.Tensor]


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

    def part(self, data: torch.Tensor) -> BoxPart:
        return BoxPart(self.number, data, self.shape, self.box)

    def host_parts(self, held: torch.Tensor) -> list[HostPart]:
        itemsize = self.dtype.itemsize
        return [
            HostPart(
                tensor=self.number,
                address=held[box.slices(self.box)].data_ptr(),
                box=box,
                shape=self.shape,
                itemsize=itemsize,
            )
            for box in self.box.split(CHUNK_NBYTES // itemsize)
        ]


class _Round:
    """The claims of one round: in tables what stays where it is and travels as it is, and `others`."""

    def __init__(
        self, claims: Sequence[_Claim], live: Live, strays: Collection[str], num_claims: int
    ) -> None:
        self._num_claims = num_claims
        self.others: list[_Claim] = []
        on_host: list[HostPart] = []
        on_gpus: dict[torch.device, list[BoxPart]] = {}
        self._views: list[torch.Tensor] = []  # they keep the memory of the tables
        for claim in claims:
            held = claim.held(live)
            if claim.segment.buffer in strays or held.dtype != claim.dtype:
                self.others.append(claim)
                continue
            if held.is_cuda:
                on_gpus.setdefault(held.device, []).append(claim.part(held))
            elif is_ready(held, claim.dtype):
                on_host += claim.host_parts(held)
            else:
                self.others.append(claim)
                continue
            self._views.append(held)
        self._host = HostTable(on_host, num_claims)
        self._gpus: list[tuple[torch.device, DigestTable]] = []
        for gpu, parts in on_gpus.items():
            with torch.cuda.device(gpu):
                self._gpus.append((gpu, box_table(parts, num_claims)))

    def digest(self, live: Live) -> Digests:
        """Return the digests of its claims: uint64[num_claims]. `live` has the buffers of `others`."""
        for gpu, table in self._gpus:
            table.launch(torch.cuda.current_stream(gpu))
        sums = DigestSums(self._num_claims)
        with torch.no_grad():
            for claim in self.others:
                sums.add([claim.part(claim.held(live).to(claim.dtype))])
        self._host.run_all()
        return combine([self._host.digests(), sums.result(), *(table.result() for _, table in self._gpus)])


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
        by_round: list[list[_Claim]] = [[] for _ in range(NUM_ROUNDS)]
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
