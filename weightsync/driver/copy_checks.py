"""Finds copies of the committed version that are damaged, so that engines are not blamed for them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Digests, Fingerprint, SnapshotHeader, combine

logger = logging.getLogger("weightsync.driver")

Copy: TypeAlias = tuple[str, int]
"""A holder's name, and the number of the part that it copied."""

Found: TypeAlias = Mapping[int, Mapping[str, Digests | None]]
"""By part and holder, the digests of the copy. None if the copy has no valid header."""

_MAX_CHOICES = 4096
"""How many ways to choose one copy of each part are tried. A way more is needed for each damaged copy."""


class CopyChecks:
    """Has holders look at their copies."""

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet

    async def without_header(self, headers: Mapping[Copy, SnapshotHeader]) -> list[Copy]:
        """Return the copies that their holders do not have any more, or whose header is damaged."""
        named = {each.name: each for each in self._fleet.holders}  # as offers name them
        calls = {holder: named[holder].snapshots() for holder, _ in headers if holder in named}
        outcome = await gather_named(calls, "check", self._config.timeout_s)
        whole = {holder: {each.header for each in its} for holder, its in outcome.answers.items()}
        return [copy for copy, header in headers.items() if header not in whole.get(copy[0], {header})]

    async def unlike_version(
        self, version: int, layout: str, copies: Mapping[int, Sequence[Offer]], expected: Fingerprint
    ) -> list[Copy]:
        """Return the copies of trainers' parts whose bytes differ from the version."""
        return differing(await self._digests(version, layout, copies), expected)

    async def like_memory(
        self, version: int, layout: str, copies: Mapping[int, Sequence[Offer]], ranks: Mapping[int, int]
    ) -> list[Copy]:
        """Return the flat copies that are equal to memory with wrong bytes, which was filled from them.

        `ranks` has the holder of the engine rank that took each part.
        """
        calls = {
            f"holder {holder}": self._fleet.holders[holder].copy_digests(None) for holder in ranks.values()
        }
        live = (await gather_named(calls, "check", self._config.timeout_s)).answers
        found = await self._digests(version, layout, {part: copies.get(part, ()) for part in ranks})
        return [
            (holder, part)
            for part, its in found.items()
            if (wrong := live.get(f"holder {ranks[part]}")) is not None
            for holder, digests in its.items()
            if digests is None or (digests == wrong).all()
        ]

    async def _digests(self, version: int, layout: str, copies: Mapping[int, Sequence[Offer]]) -> Found:
        """Return the digests of all copies whose holders answer."""
        named = {each.name: each for each in self._fleet.holders}  # as offers name them
        calls = {
            f"{offer.holder}, part {part}": named[offer.holder].copy_digests(
                SnapshotHeader(version, layout, part)
            )
            for part, its in copies.items()
            for offer in its
            if offer.holder in named
        }
        outcome = await gather_named(calls, "check", self._config.timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[driver · v%d] the copy of %s is not checked: %s", version, name, error)
        return {
            part: {
                offer.holder: outcome.answers[name]
                for offer in its
                if (name := f"{offer.holder}, part {part}") in outcome.answers
            }
            for part, its in copies.items()
        }


def differing(found: Found, expected: Fingerprint) -> list[Copy]:
    """Return the copies that do not add up to the version's fingerprint `expected`.

    If copies of a part differ, the right copies add up with the other parts. If none do, all are
    returned: nothing can be filled from them. If nothing is known of a part, copies without a header are.
    """
    kinds = [{each.tobytes(): each for each in its.values() if each is not None} for its in found.values()]
    ways = itertools.islice(itertools.product(*(kind.values() for kind in kinds)), _MAX_CHOICES)
    right = next((each for each in ways if (combine(each) == expected).all()), None)
    return [
        (holder, part)
        for number, (part, its) in enumerate(found.items())
        for holder, digests in its.items()
        if digests is None or (all(kinds) and (right is None or (digests != right[number]).any()))
    ]
