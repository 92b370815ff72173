"""Stages a version: its bytes reach the engines' hosts or GPUs, and are compared, while engines serve."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection
from weightsync.driver.events import Events, HolderSilent
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.snapshots.delta_choice import DeltaChoice
from weightsync.driver.verifying.trainers import Publication
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, TransportError
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import (
    Delta,
    Fingerprint,
    Refilled,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
    combine,
)
from weightsync.protocol.timing import Span

logger = logging.getLogger("weightsync.driver")


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A version in memory of the engines' hosts.

    Attributes:
        version: its number.
        layout: `Plan.content`.
        expected: its fingerprint.
        parts: the staged parts of each holder, by the holder's index.
        nodes: each engine host's complete parts, by the host's name and the part's number.
        copied: the bytes that hosts copied from each holder, and how.
        on_device: the holders that also copied the version to the GPUs of their engine ranks.
    """

    version: int
    layout: str
    expected: Fingerprint
    parts: Mapping[int, Sequence[StagedPart]]
    nodes: Mapping[str, Mapping[int, StagedPart]]
    copied: Refilled
    on_device: frozenset[int] = frozenset()

    @property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """Time spans per holder: `StagedPart.spans` of the holder's parts."""
        return {
            f"holder {i}": [span for each in parts for span in each.spans] for i, parts in self.parts.items()
        }

    def snapshot(self, node: str, holder: int) -> Snapshot:
        """Return the version as the rank of `holder`, on host `node`, takes it."""
        parts = {number: (part.offer,) for number, part in self.nodes[node].items()}
        return Snapshot(self.version, self.layout, parts, on_device=holder in self.on_device)


class Stager:
    """Decides which holder stages which part, and has the holders stage the parts.

    On a trainer's host, the trainer's holder stages the part. On every other host with engines, one holder
    copies the part. From there, holders copy it to their GPUs, unless ``sync.stage`` is host.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, events: Events) -> None:
        self._config, self._fleet, self._events = config, fleet, events
        self._homes: dict[str, dict[int, int]] = {}
        self._reserved: dict[int, tuple[int, ...]] = {}
        self._offers: dict[tuple[int, int], Sequence[Offer]] = {}
        self._mapping: set[int] = set()
        self._on_device: dict[int, bool] = {}
        self._choice = DeltaChoice(config.deltas)

    async def reserve(self) -> None:
        """Have holders allocate memory for two versions of what they stage. Call it once.

        Raises TransportError if memory is short, and ConfigError if ``sync.stage`` is device and a GPU has no
        memory for a second copy of the weights.
        """
        shortages = await self._reserve(self._fleet.live(), everyone=True)
        if shortages and self._config.stage == "device":
            holder, why = next(iter(shortages.items()))
            raise ConfigError(
                "sync.stage", "device", f"holder {holder} has no second copy: {why}; or give host"
            )
        await self._map(self._fleet.live())

    async def stage(
        self,
        version: int,
        connection: Connection,
        publication: Publication,
        takers: Mapping[str, EngineMember],
    ) -> StagedVersion:
        """Stage the published version on every host with engines, and compare digests there.

        Raises the error of the holder that failed, or TransportError naming the holder whose bytes differ.
        """
        await self._reserve(takers)  # of an engine that was added on a new host
        await self._map(takers)
        content, expected = connection.content, publication.fingerprint
        headers = [SnapshotHeader(version, content, part) for part in range(len(self._fleet.trainers))]
        owners = [home for _, home in self._fleet.trainers]
        far = [
            [its[part] for its in self._homes.values() if its[part] != own] for part, own in enumerate(owners)
        ]
        sizes = [connection.plan.send_buffer_nbytes(part) for part in range(len(owners))]
        saves = {
            home: StageTask(
                headers[part],
                (),
                expected,
                self._fleet.node(home) in self._homes,
                delta=self._choice.makes(part, sizes[part], far[part]),
            )
            for part, home in enumerate(owners)
        }
        saved = await self._ask(saves, self._config.timeout_s)
        copies: defaultdict[int, list[SnapshotPart]] = defaultdict(list)
        deltas: defaultdict[int, dict[int, Delta]] = defaultdict(dict)
        for part, own in enumerate(owners):
            source = saved[own][0]
            for home in far[part]:
                copies[home].append(SnapshotPart(headers[part], source.offer, expected))
                if source.delta and self._choice.takes(part, sizes[part], home, source.delta):
                    deltas[home][part] = source.delta
        tasks = {i: StageTask(None, its, expected, True, deltas=deltas[i]) for i, its in copies.items()}
        copied = await self._ask(tasks, self._config.connect_timeout_s)
        parts = {home: [*saved.get(home, ()), *copied.get(home, ())] for home in saved.keys() | copied.keys()}
        nodes = {
            node: {n: next(each for each in parts[home] if each.part == n) for n, home in homes.items()}
            for node, homes in self._homes.items()
        }
        self._compare(version, connection, publication, nodes)
        reads = []
        for home, each in ((home, each) for home, its in copied.items() for each in its):
            self._choice.note((each.part, home), each, sizes[each.part])
            owner = f"holder {owners[each.part]}"
            reads.append(Refilled({owner: each.nbytes}, {owner: each.way}, 0.0))
        read = Refilled.together(reads)
        staged = StagedVersion(version, content, expected, parts, nodes, read)
        return await self._to_devices(takers, staged)

    async def _to_devices(self, takers: Mapping[str, EngineMember], staged: StagedVersion) -> StagedVersion:
        """Have holders copy the staged parts to their GPUs. Other ranks read them from their hosts.

        Raises the error of a holder that does not answer.
        """
        holders = {i for member in takers.values() for i in member.holders if self._on_device.get(i)}
        calls = {}
        for i in sorted(holders):
            snapshot = staged.snapshot(self._fleet.node(i), i)
            task = StageTask(None, (), staged.expected, digests=False, to_device=snapshot)
            calls[f"holder {i}"] = self._fleet.holders[i].stage(task, self._config.timeout_s)
        outcome = await gather_named(calls, "stage", self._config.connect_timeout_s + GRACE_S)
        for name, error in outcome.failures.items():
            if isinstance(error, DeadlineError | PeerLostError):
                self._events.publish(HolderSilent())
                raise error
            where = f"[driver · v{staged.version}] {name}"
            logger.warning("%s copies from its host while its engine is paused: %s", where, error)
        return replace(staged, on_device=frozenset(i for i in holders if f"holder {i}" in outcome.answers))

    async def _reserve(
        self, members: Mapping[str, EngineMember], everyone: bool = False
    ) -> Mapping[int, str]:
        """Choose homes on hosts that have none. `everyone`: also free all parts staged before.

        Returns why GPUs have no second copy, by holder that was asked for a second copy.
        """
        engines: defaultdict[str, list[int]] = defaultdict(list)
        fed = dict.fromkeys(holder for member in members.values() for holder in member.holders)
        for holder in fed:
            if (node := self._fleet.node(holder)) not in self._homes:
                engines[node].append(holder)
        new = fed.keys() - self._on_device.keys() if self._config.stage != "host" else set[int]()
        if not (engines or new or everyone):
            return {}
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
        asked = range(len(self._fleet.holders)) if everyone else {*wanted, *new}
        parts = {i: tuple(wanted.get(i, ())) for i in asked}
        calls = {
            f"holder {i}": self._fleet.holders[i].reserve_staged(its, i in new)
            for i, its in parts.items()
            if self._reserved.get(i) != its or i in new
        }
        answers = (await gather_named(calls, "reserve", self._config.connect_timeout_s)).require()
        for i in parts:
            if memory := answers.get(f"holder {i}"):
                self._offers |= {(part, i): its for part, its in memory.offers.items()}
        self._homes, self._reserved = homes, self._reserved | parts
        return self._note({i: answers[f"holder {i}"] for i in sorted(new)})

    def _note(self, memory: Mapping[int, StagingMemory]) -> Mapping[int, str]:
        """Note which GPUs have a second copy. Returns why others have none, by holder."""
        self._on_device |= {i: each.has_second_copy for i, each in memory.items()}
        shortages = {
            i: each.shortage or "it does not write its engine's weights"
            for i, each in memory.items()
            if not each.has_second_copy
        }
        for i, why in shortages.items():
            logger.info("[driver] holder %d stages on its host, not on its GPU: %s", i, why)
        return shortages

    async def _map(self, members: Mapping[str, EngineMember]) -> None:
        """Have new holders map the parts staged on their host, so that no pause includes this."""
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
        """Raise TransportError if a host's bytes differ from the published bytes."""
        for node, parts in nodes.items():
            found = {n: each.fingerprint for n, each in parts.items() if each.fingerprint is not None}
            if len(found) == len(parts) and (combine([*found.values()]) == publication.fingerprint).all():
                continue
            published = {n: publication.answers[f"trainer {n}"].fingerprint for n in parts}
            wrong = [n for n in found if (found[n] != published[n]).any() and not connection.checkpoint]
            self._choice.doubt((n, self._homes[node][n]) for n in wrong or parts)
            blamed = ", ".join(
                f"part {n} (of trainer {n}) in holder {self._homes[node][n]}" for n in wrong or parts
            )
            raise TransportError(
                f"version {version}: wrong bytes were staged: {blamed}; no engine was paused"
            )
