"""How a follower comes to a version with the fewest bytes, and which versions that needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.stores.manifest import Manifest, Stored

Versions = Callable[[int], Manifest | None]
"""Returns the manifest of a version, None if the store does not have it."""

MOST_DELTAS = 100
"""The most versions after an anchor, and so the most deltas that a follower applies when it joins."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way to make a file: copy `start`, which is here or stored whole, and apply `changes`, oldest first.

    Attributes:
        nbytes: the bytes to download.
    """

    start: Stored
    changes: tuple[Stored, ...]
    nbytes: int


def route(name: str, target: Manifest, versions: Versions, has: Callable[[Stored], bool]) -> Route | None:
    """Return the shortest way to a file of `target`; None if the store has none.

    `has`: returns whether a file is here.
    """
    at: Manifest | None = target
    changes: tuple[Stored, ...] = ()
    best: Route | None = None
    nbytes = 0
    while at and (file := at.files.get(name)) and not (best and best.nbytes <= nbytes):
        if has(file.content):
            return Route(file.content, changes, nbytes)
        if file.whole and not (best and best.nbytes <= nbytes + file.content.nbytes):
            best = Route(file.content, changes, nbytes + file.content.nbytes)
        if file.delta:
            changes, nbytes = (file.delta, *changes), nbytes + file.delta.nbytes
        before = versions(at.base) if at.base else None
        at = before if before and before.contents.get(name) == file.base else None
    return best


def since_anchor(newest: Manifest, versions: Versions) -> tuple[int, int]:
    """Return the number of versions after the last anchor until `newest`, and the bytes of their deltas."""
    num = nbytes = 0
    at: Manifest | None = newest
    while at and not at.is_anchor:
        num, nbytes = num + 1, nbytes + at.delta_nbytes
        at = versions(at.base) if at.base else None
    return num, nbytes


def first_needed(oldest: Manifest, versions: Versions) -> int:
    """Return the first version that whoever joins at `oldest` needs."""
    at, names = oldest, {*oldest.files}
    while names := {name for name in names if name in at.files and not at.files[name].whole}:
        before = versions(at.base) if at.base else None
        if before is None:
            break
        at = before
    return at.version
