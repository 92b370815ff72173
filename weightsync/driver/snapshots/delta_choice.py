"""Decides which links between hosts get deltas of staged parts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from weightsync.protocol.messages import Delta, StagedPart
from weightsync.protocol.timing import seconds_of
from weightsync.text import size_text

logger = logging.getLogger("weightsync.driver")

LOOK_AGAIN = 16
"""A delta is made again after so many versions without one: densities change, and so do links."""

_FADING = 0.9
"""A link's `apply_s` after a whole version, as a fraction of before: it may have been slow only once."""

Link = tuple[int, int]
"""The number of a part, and the holder that copies it to its host."""


@dataclass(slots=True)
class _Known:
    """Measurements of a link.

    Attributes:
        rate: bytes per second when the whole part was copied; None before.
        apply_s: how long it took to use the last delta, beside copying it at that rate.
        has_delta: whether the last version came as a delta.
    """

    rate: float | None = None
    apply_s: float = 0.0
    has_delta: bool = False

    def seconds(self, nbytes: int) -> float:
        """Return how long the link needs for `nbytes`; 0 if nothing is known."""
        return nbytes / self.rate if self.rate else 0.0


class DeltaChoice:
    """Chooses by the rates of links, the sizes of deltas, and the time to make and to use them.

    With ``sync.deltas: auto``, the first version over a link is copied whole, which measures the link.
    """

    def __init__(self, mode: Literal["none", "auto", "always"]) -> None:
        self._mode = mode
        self._links: dict[Link, _Known] = {}
        self._made: dict[int, Delta] = {}
        self._num_without: dict[int, int] = {}
        self._doubted: set[Link] = set()

    def makes(self, part: int, nbytes: int, homes: Collection[int]) -> bool:
        """Return whether a delta of `part`, of `nbytes` bytes, is worth making for the holders `homes`."""
        if self._mode != "auto":
            return self._mode == "always" and bool(homes)
        links = [self._known((part, home)) for home in homes]
        made, num = self._made.get(part), self._num_without.get(part, 0)
        gains = (
            made is None
            or num >= LOOK_AGAIN
            or any(_gains(made, nbytes, each, made.seconds) for each in links)
        )
        wanted = gains and any(each.rate for each in links)
        self._num_without[part] = 0 if wanted else num + 1
        return wanted

    def takes(self, part: int, nbytes: int, home: int, made: Delta) -> bool:
        """Return whether holder `home` shall get this delta in place of the part. The delta is there now."""
        self._made[part] = made
        if (part, home) in self._doubted:
            return False
        if made.offer is None or self._mode == "always":
            return made.offer is not None
        return _gains(made, nbytes, self._known((part, home)), 0.0)

    def note(self, link: Link, copied: StagedPart, nbytes: int) -> None:
        """Learn from a copy of a part of `nbytes` bytes. Logs when a link changes to deltas, or back."""
        known, has_delta = self._known(link), copied.nbytes != nbytes
        if not has_delta:
            self._doubted.discard(link)
        seconds = seconds_of(copied.spans, "copy")
        if has_delta:
            known.apply_s = max(0.0, seconds - known.seconds(copied.nbytes))
        else:
            known.rate = copied.nbytes / max(seconds, 1e-9)
            known.apply_s *= _FADING
        if known.has_delta != has_delta:
            known.has_delta, (part, home) = has_delta, link
            sizes = f"{size_text(copied.nbytes)} of {size_text(nbytes)}" if has_delta else size_text(nbytes)
            how = "only with its changes" if has_delta else "whole again"
            logger.info("[driver] part %d goes to holder %d %s: %s", part, home, how, sizes)

    def doubt(self, links: Iterable[Link]) -> None:
        """Send whole parts over `links` next: the bytes were wrong, as the committed version there may be."""
        self._doubted.update(links)

    def _known(self, link: Link) -> _Known:
        return self._links.setdefault(link, _Known())


def _gains(made: Delta, nbytes: int, known: _Known, make_s: float) -> bool:
    return make_s + known.seconds(made.nbytes) + known.apply_s < known.seconds(nbytes)
