"""Chooses the sources for filling an engine: copies, and engines that serve the same version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Snapshot, SnapshotHeader
from weightsync.readers.ways import way_of

Parts = Mapping[int, Sequence[Offer]]
"""Offers by the number of the part."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Copies of each part, and engines whose live memory has it."""

    copies: Parts = field(default_factory=dict)
    live: Sequence[str] = ()

    def parts(self, offers: Mapping[str, Mapping[int, Offer]]) -> dict[int, Sequence[Offer]]:
        """Return the offers of each part. `offers` has live engines' offers; copies come first."""
        found: dict[int, dict[str, Offer]] = {}
        for part, copies in self.copies.items():
            found[part] = {offer.holder: offer for offer in copies}
        for name in self.live:
            for part, offer in offers.get(name, {}).items():
                found.setdefault(part, {}).setdefault(offer.holder, offer)
        return {part: [*each.values()] for part, each in found.items()}


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """The sources for filling one engine.

    Attributes:
        first: the sources that the engine reads.
        reserve: the sources that the engine reads when nothing of `first` is left.
        is_near: `first` is on the engine's own host, so nothing crosses a link.
    """

    first: Sources
    reserve: Sources = field(default_factory=Sources)
    is_near: bool = False

    @property
    def suffices(self) -> bool:
        """Return True if every part has a source, provided that the live engines offer their parts."""
        return bool(self.first.live) or (bool(self.first.copies) and all(self.first.copies.values()))

    def snapshot(
        self, header: SnapshotHeader, num_parts: int, is_flat: bool, live: Mapping[str, Mapping[int, Offer]]
    ) -> Snapshot | None:
        """Return the offers of `num_parts` parts from `header` on, None if a part is nowhere.

        `live` has the offers of live engines.
        """
        numbers = range(header.part, header.part + num_parts)
        first, reserve = self.first.parts(live), self.reserve.parts(live)
        parts = {number: first.get(number) or reserve.pop(number, ()) for number in numbers}
        if not parts or not all(parts.values()):
            return None
        return Snapshot(header.version, header.layout, parts, is_flat, reserve)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All possible sources for filling an engine.

    Attributes:
        copies: offers of each part.
        hosts: the host of each holder that made a copy.
        live: engines alike that serve the version, by host.
        nodes: the hosts of the engine's ranks.
        mixes: a part is one rank's weights, both in copies and in live memory. Otherwise each rank needs all
            copies, and reads either only copies or only live memory.
    """

    copies: Parts
    hosts: Mapping[str, str]
    live: Mapping[str, str]
    nodes: Sequence[str]
    mixes: bool

    def choose(self) -> SourceChoice:
        """Choose sources of the engine's own host, else of as many hosts as there are."""
        near, far = self._near(), self._near(others=True)
        copied = [{*map(self._host, offers)} for offers in self.copies.values()]
        has_all = set.intersection(*copied) if copied else set()
        if near and all(self._needs(part) <= {*map(self._host, its)} for part, its in near.items()):
            return SourceChoice(Sources(near), Sources(far), is_near=True)
        if own := self.live.get(self.nodes[0]):
            rest = [name for name in self.live.values() if name != own]
            copies = self.copies if self.mixes else {}
            return SourceChoice(Sources(live=[own]), Sources(copies, rest), is_near=True)
        offers = (offer for its in self.copies.values() for offer in its)
        if self._are_whole and all(way_of(offer.protocol).is_fast for offer in offers):
            # Reading only copies is quicker.
            return SourceChoice(Sources(self.copies))
        if self.mixes:
            elsewhere = [name for host, name in self.live.items() if host not in has_all]
            return SourceChoice(Sources(self.copies, elsewhere))
        # A rank reads one part from live memory, but all parts from copies.
        if self.live and (
            len(self.nodes) > 1 or len(self.live) > len(set[str]().union(*copied)) or not self._are_whole
        ):
            return SourceChoice(Sources(live=[*self.live.values()]))
        return SourceChoice(Sources(self.copies))

    def shared(self, host: str, others: int) -> Parts:
        """Return copies of the parts that one holder on `host` copies for all ranks there.

        `others`: the ranks of other engines there that need the same parts. Nothing is copied for a single
        rank, or if ranks read their own parts from live memory.
        """
        if (
            self.mixes
            or not self._are_whole
            or self.nodes.count(host) + others < 2
            or self.choose().first.live
        ):
            return {}
        return {part: its for part, its in self.copies.items() if host not in map(self._host, its)}

    def _host(self, offer: Offer) -> str:
        return self.hosts[offer.holder]

    def _needs(self, part: int) -> set[str]:
        """Return the hosts of the ranks that need a part."""
        return {self.nodes[part - min(self.copies)]} if self.mixes else set(self.nodes)

    def _near(self, others: bool = False) -> Parts:
        """Return the copies on the hosts of ranks that need them, or the others."""
        return {
            part: [each for each in its if (self._host(each) in self._needs(part)) is not others]
            for part, its in self.copies.items()
        }

    @property
    def _are_whole(self) -> bool:
        return bool(self.copies) and all(self.copies.values())
