"""Compares the live parameters of equal engines that loaded equal tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TypeAlias

from weightsync.protocol.messages import Fingerprint, LiveDigest, LoadReport

_Place: TypeAlias = tuple[int, str]
"""A rank's number, and the kind of its live parameters."""


class LiveDigests:
    """The live digests of the last version, by rank and kind.

    A refilled engine is compared with engines that took the version before, also with its own last digests.

    Attributes:
        right: the digests that engines agree on, and these engines. Empty if no engine converts tensors.
    """

    def __init__(self) -> None:
        self._version = b""
        self.right: dict[_Place, tuple[str, set[str]]] = {}

    def of(self, engine: str, rank: int) -> LiveDigest | None:
        """Return the digest that a rank of an engine had, if it was right."""
        found = (
            LiveDigest(kind, right)
            for (number, kind), (right, names) in self.right.items()
            if number == rank and engine in names
        )
        return next(found, None)

    def learn(self, expected: Fingerprint, rank: int, live: LiveDigest) -> None:
        """Note a correct digest for these tensors, which a previous driver had compared."""
        self._begin(expected)
        self.right.setdefault((rank, live.kind), (live.digest, set()))

    def num_alike(self, engine: str) -> int:
        """Return how many other engines took these tensors, and hold the same bytes on each rank."""
        return min((len(names) - 1 for _, names in self.right.values() if engine in names), default=0)

    def unlike(self, loaded: Mapping[str, LoadReport], expected: Fingerprint) -> dict[str, list[str]]:
        """Return the ranks whose live parameters differ from those of equal engines, by engine.

        If no more than half of the equal engines agree, and no engine took these tensors before, all are
        returned. Engines that got copies of parameters are returned too, if no equal engine took these
        tensors.

        Args:
            loaded: the answers of engines that got the right tensors or `are_copied`, by name.
            expected: the fingerprint of these tensors.
        """
        self._begin(expected)
        found: defaultdict[_Place, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, report in loaded.items():
            for rank, live in enumerate(report.live):
                if live is not None:
                    found[rank, live.kind][live.digest].append(name)
        unlike: defaultdict[str, list[str]] = defaultdict(list)
        for place, by_digest in found.items():
            loaders = {
                digest: [name for name in names if not loaded[name].are_copied]
                for digest, names in by_digest.items()
            }
            right, agreed = self.right.get(place) or (_majority(loaders), set())
            if right:
                self.right[place] = right, agreed.union(by_digest.get(right, ()))
            for name in (name for digest, names in by_digest.items() if digest != right for name in names):
                unlike[name].append(f"live parameters of rank {place[0]}, which engines alike have otherwise")
        return dict(unlike)

    def _begin(self, expected: Fingerprint) -> None:
        if self._version != expected.tobytes():
            self._version, self.right = expected.tobytes(), {}


def _majority(engines: Mapping[str, Collection[str]]) -> str:
    """Return the digest that more than half of the engines have, or an empty string."""
    num_engines = sum(map(len, engines.values()))
    return next((digest for digest, names in engines.items() if 2 * len(names) > num_engines), "")
