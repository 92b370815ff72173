"""Stages a version: its bytes reach the engines' hosts, and are compared there, while engines serve."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsync.config import SyncConfig
from weightsync.driver.connect import Connection
from weightsync.driver.events import Events, HolderSilent
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.trainers import Publication
from weightsync.errors import DeadlineError, PeerLostError, TransportError
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import (
    Fingerprint,
    Refilled,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    combine,
)

logger = logging.getLogger("weightsync.driver.stager")


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A version in memory of the engines' hosts.

    Attributes:
        version: its number.
        layout: `Plan.content`.
        expected: its fingerprint.
        parts: by the index of each holder that staged any, its parts.
        nodes: each engine host's complete parts, by the host's name and the part's number.
        copied: the bytes that hosts copied from each holder, and how.
    """

    version: int
    layout: str
    expected: Fingerprint
    parts: Mapping[int, Sequence[StagedPart]]
    nodes: Mapping[str, Mapping[int, StagedPart]]
    copied: Refilled

    def snapshot(self, node: str) -> Snapshot:
        """Return the version as the ranks on host `node` read it."""
        parts = {number: (part.offer,) for number, part in self.nodes[node].items()}
        return Snapshot(self.version, self.layout, parts)


class Stager:
    """Decides which holder stages which part, and has them do it.

    On its trainer's host a part is staged by the trainer's holder. Each other host with engines copies it
    once, into one of its holders.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, events: Events) -> None:
        self._config, self._fleet, self._events = config, fleet, events
        self._homes: dict[str, dict[int, int]] = {}
        self._reserved: dict[int, tuple[int, ...]] = {}
        self._offers: dict[tuple[int, int], Sequence[Offer]] = {}
        self._mapping: set[int] = set()

    async def reserve(self) -> None:
        """Have holders allocate memory for two versions of what they stage.

        Raises TransportError when it is short.
        """
        self._homes, self._reserved, self._offers = {}, {}, {}
        self._mapping.clear()
        await self._reserve(self._fleet.live(), everyone=True)
        await self._map(self._fleet.live())

    async def stage(
        self,
        version: int,
        connection: Connection,
        publication: Publication,
        takers: Mapping[str, EngineMember],
    ) -> StagedVersion:
        """Stage what was published on every host with engines, and compare digests there.

        Raises the error of the holder that failed, or TransportError naming the holder whose bytes differ.
        """
        await self._reserve(takers)  # of an engine that was added on a new host
        await self._map(takers)
        content, expected = connection.content, publication.fingerprint
        headers = [SnapshotHeader(version, content, part) for part in range(len(self._fleet.trainers))]
        owners = [home for _, home in self._fleet.trainers]
        saves = {
            home: StageTask(headers[part], (), expected, self._fleet.node(home) in self._homes)
            for part, home in enumerate(owners)
        }
        saved = await self._ask(saves, self._config.timeout_s)
        sources = {part: saved[home][0] for part, home in enumerate(owners)}
        copies: defaultdict[int, list[SnapshotPart]] = defaultdict(list)
        for homes in self._homes.values():
            for part, home in homes.items():
                if home != owners[part]:
                    copies[home].append(SnapshotPart(headers[part], sources[part].offer, expected))
        tasks = {home: StageTask(None, parts, expected, True) for home, parts in copies.items()}
        copied = await self._ask(tasks, self._config.connect_timeout_s)
        parts = {home: [*saved.get(home, ()), *copied.get(home, ())] for home in saved.keys() | copied.keys()}
        nodes = {
            node: {n: next(each for each in parts[home] if each.part == n) for n, home in homes.items()}
            for node, homes in self._homes.items()
        }
        self._compare(version, connection, publication, nodes)
        nbytes, ways = Counter[str](), {}
        for each in (each for its in copied.values() for each in its):
            nbytes[f"holder {owners[each.part]}"] += each.nbytes
            ways[f"holder {owners[each.part]}"] = each.way
        return StagedVersion(version, content, expected, parts, nodes, Refilled(dict(nbytes), ways, 0.0))

    async def _reserve(self, members: Mapping[str, EngineMember], everyone: bool = False) -> None:
        """Choose homes on hosts that have none. `everyone`: also free what holders staged before."""
        engines: defaultdict[str, list[int]] = defaultdict(list)
        for holder in dict.fromkeys(holder for member in members.values() for holder in member.holders):
            if (node := self._fleet.node(holder)) not in self._homes:
                engines[node].append(holder)
        if not engines and not everyone:
            return
        owners = [own for _, own in self._fleet.trainers]
        homes = self._homes | {
            node: {
                part: own if self._fleet.node(own) == node else holders[part % len(holders)]
                for part, own in enumerate(owners)
            }
            for node, holders in engines.items()
        }
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        pairs = [*enumerate(owners), *(pair for its in homes.values() for pair in its.items())]
        for part, home in dict.fromkeys(pairs):
            wanted[home].append(part)
        asked = range(len(self._fleet.holders)) if everyone else [*wanted]
        parts = {i: tuple(wanted.get(i, ())) for i in asked}
        calls = {
            f"holder {i}": self._fleet.holders[i].reserve_staged(its)
            for i, its in parts.items()
            if self._reserved.get(i) != its
        }
        answers = (await gather_named(calls, "reserve", self._config.connect_timeout_s)).require()
        for i in parts:
            offers = answers.get(f"holder {i}", {})
            self._offers |= {(part, i): its for part, its in offers.items()}
        self._homes, self._reserved = homes, self._reserved | parts

    async def _map(self, members: Mapping[str, EngineMember]) -> None:
        """Have holders that are new here map what others of their host stage, so that no pause does."""
        calls = {}
        for holder in {holder for member in members.values() for holder in member.holders} - self._mapping:
            homes = self._homes[self._fleet.node(holder)]
            offers = {part: self._offers[part, home] for part, home in homes.items() if home != holder}
            if offers:
                calls[f"holder {holder}"] = self._fleet.holders[holder].map(offers)
            self._mapping.add(holder)
        outcome = await gather_named(calls, "map", self._config.connect_timeout_s)
        for error in outcome.failures.values():
            logger.warning("[driver] what is staged on the same host is not mapped: %s", error)

    async def _ask(
        self, tasks: Mapping[int, StageTask], limit_s: float
    ) -> Mapping[int, Sequence[StagedPart]]:
        calls = {
            f"holder {i}": self._fleet.holders[i].stage(task, self._config.timeout_s)
            for i, task in tasks.items()
        }
        outcome = await gather_named(calls, "stage", limit_s + GRACE_S, together=True)
        if any(isinstance(error, DeadlineError | PeerLostError) for error in outcome.failures.values()):
            self._events.publish(HolderSilent())
        answers = outcome.require()
        return {i: answers[f"holder {i}"] for i in tasks}

    def _compare(
        self,
        version: int,
        connection: Connection,
        publication: Publication,
        nodes: Mapping[str, Mapping[int, StagedPart]],
    ) -> None:
        """Raise TransportError if a host's bytes are not what trainers published."""
        for node, parts in nodes.items():
            found = {n: each.fingerprint for n, each in parts.items() if each.fingerprint is not None}
            if len(found) == len(parts) and (combine([*found.values()]) == publication.fingerprint).all():
                continue
            published = {n: publication.answers[f"trainer {n}"].fingerprint for n in parts}
            wrong = [n for n in found if (found[n] != published[n]).any() and not connection.checkpoint]
            blamed = ", ".join(
                f"part {n} (of trainer {n}) in holder {self._homes[node][n]}" for n in wrong or parts
            )
            raise TransportError(
                f"version {version}: wrong bytes were staged: {blamed}; no engine was paused"
            )
