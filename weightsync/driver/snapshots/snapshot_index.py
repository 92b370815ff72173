"""The holders' snapshots of the committed version, copied while engines already serve it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection
from weightsync.driver.copy_checks import Copy, CopyChecks
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import Events, HolderSilent
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.snapshots.host_copies import HostCopies, Wanted
from weightsync.driver.snapshots.live_sources import LiveSources
from weightsync.driver.snapshots.snapshot_memory import reserving
from weightsync.driver.snapshots.source_choice import Candidates, SourceChoice
from weightsync.driver.snapshots.stager import StagedVersion
from weightsync.driver.verifying.live_digests import LiveDigests
from weightsync.errors import DeadlineError, PeerLostError, WeightSyncError
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Fingerprint, LiveDigest, Snapshot, SnapshotHeader, SnapshotPart

logger = logging.getLogger("weightsync.driver")

T = TypeVar("T")
_LATER_S = 0.002
"""How long after a commit copying starts, so that the update returns before Ray is asked to call holders."""
_NO_MEMORY = "memory for it is not there yet"
_UNFILLED = (EngineState.EMPTY, EngineState.STALE, EngineState.DEAD)
"""States of engines that are filled soon, unless they were given up."""


@dataclass(slots=True)
class _Version:
    """Offers of each part of a version, by layout and the part's number.

    `hosts` has the host of each holder that made one. `damaged` are copies that are offered no more.
    """

    number: int = 0
    offers: defaultdict[str, dict[int, list[Offer]]] = field(default_factory=lambda: defaultdict(dict))
    hosts: dict[str, str] = field(default_factory=dict)
    damaged: set[Copy] = field(default_factory=set)

    def add(self, layout: str, part: int, offer: Offer, host: str) -> None:
        self.offers[layout].setdefault(part, []).append(offer)
        self.hosts[offer.holder] = host
        self.damaged.discard((offer.holder, part))

    def lose(self, holder: str, part: int | None = None) -> None:
        """Forget all offers of a holder, or only of one part."""
        for parts in self.offers.values():
            for number, offers in parts.items():
                if part in (number, None):
                    parts[number] = [offer for offer in offers if offer.holder != holder]

    def drop(self, damaged: Sequence[Copy]) -> None:
        for holder, part in damaged:
            where = f"[{holder} · v{self.number}]"
            logger.warning("%s its copy of part %d is damaged, and not used any more", where, part)
            self.lose(holder, part)
        self.damaged.update(damaged)


class SnapshotIndex:
    """Snapshots of one committed version, in parts.

    A holder copies each part, then holders on other hosts replicate the part. A part is a trainer rank's
    published weights. If trainers' memory is read in place, a part is an engine rank's served weights.

    Attributes:
        expected: the version's fingerprint.
        live: digests of parameters that engines converted. Copies of such parameters have the same digests.
        host_copies: copies that several engine ranks of a host read; they count as snapshots.
        live_sources: engines that serve the version; other engines can read them if there are no copies.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, events: Events, engine_group: EngineGroup) -> None:
        self._config, self._fleet, self._events = config, fleet, events
        self.live_sources = LiveSources(config, fleet, engine_group)
        self.host_copies = HostCopies(config, fleet)
        self._checks = CopyChecks(config, fleet)
        self._reserving: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None
        self._replicating: asyncio.Task[None] | None = None
        self._now, self._begun = _Version(), 0
        self._taken = 0  # the version that engines took since they were connected
        self._begins_deltas = False  # the next staged version begins from copies of this one
        self.expected: Fingerprint | None = None
        self.live = LiveDigests()

    def reserve(self, connection: Connection) -> None:
        """Start to have holders allocate and map their snapshots' memory. Copies of a version wait for it."""
        self._taken = 0  # holders do not know the version in newly mapped memory
        if self._config.keep_versions < 2:
            return
        for name in connection.layouts if connection.in_place else ():
            if name not in connection.flat_layouts:
                logger.warning(
                    "[engine %s] no snapshot fills it, since holders have not mapped its memory: after a "
                    "failure it waits for the next update; sync.stage host keeps one",
                    name,
                )
        every = self._parts(0, connection, everyone=True)
        parts = {home: header.part for header, homes in every for home in homes}
        # Engines of equal layout are filled from one copy.
        readers = {
            holder: part
            for name, flat in connection.flat_layouts.items()
            for part, holder in enumerate(self._fleet.engines[name].holders, start=flat.first)
        }
        if self._config.refill != "auto":
            readers = {}
        if parts:
            given = self._config, self._fleet, self._events
            self._reserving = reserving(*given, parts, readers, connection.in_place)

    def begin(self, version: int, connection: Connection, expected: Fingerprint) -> None:
        """Start snapshotting the committed `version`. Its memory must not change until `copied` returns."""
        self._now, self._begun, self.expected = _Version(), version, expected
        self._taken, self.live_sources.left_out, self._begins_deltas = version, frozenset(), False
        if self._config.keep_versions > 1 and (connection.flat_layouts or not connection.in_place):
            self._copying = asyncio.create_task(self._copy(version, connection, expected))

    def begin_staged(self, staged: StagedVersion) -> None:
        """Start to make a staged version, which committed, the snapshots."""
        self._now, self._begun, self.expected = _Version(), staged.version, staged.expected
        self._begins_deltas = self._config.deltas != "none"
        self._copying = asyncio.create_task(self._keep_staged(staged))

    def forget(self) -> None:
        """Forget the version: the connection has other tensors, which the version's digests do not number."""
        self._now, self._taken, self.expected = _Version(), 0, None

    @property
    def is_reserving(self) -> bool:
        """Return True if holders still allocate or map memory.

        Until then, holders must not be asked to fill engines from this memory.
        """
        return self._reserving is not None and not self._reserving.done()

    async def copied(self) -> None:
        """Wait until send buffers and engines may be written again."""
        if (copying := self._copying) and not copying.done():
            # A copy has a deadline of its own, and its error names the silent holder. The wait for memory has
            # the longer deadline of connecting, but a call must not take that long. So this timeout includes
            # the wait for memory. Until the memory is there, no holder is asked to copy, so no holder reads
            # while the next version is written.
            done, _ = await asyncio.wait([copying], timeout=self._config.timeout_s + GRACE_S)
            if not done:
                what = _NO_MEMORY if self.is_reserving else "copying it takes too long"
                logger.warning("[driver · v%d] holders keep no copy of it: %s", self._begun, what)
            copying.cancel()

    async def ended(self) -> None:
        """Wait until no holder allocates or copies. Late work is given up.

        Call this before a fleet is placed or connected again: numbers of holders and parts may change, and
        holders unmap memory for which they would allocate, or which they would copy.
        """
        deadline = time.monotonic() + self._config.timeout_s + GRACE_S
        await self.copied()
        await _give_up(self._reserving, deadline - time.monotonic())

    async def writable(self, released: Collection[str] = ()) -> None:
        """Wait until no memory of an engine is read, and send buffers may be written again.

        Memory of engines in `released` is about to be released. If `released` is empty, an update follows. An
        update does not wait for memory of copies: without this memory, the update's version is copied instead
        of the previous version.
        """
        self.live_sources.left_out |= set(released)
        if self._copying and self.is_reserving and not released:  # no holder has been asked to copy
            self._copying.cancel()
            logger.info("[driver · v%d] holders keep no copy of it: %s", self._begun, _NO_MEMORY)
        if self.live_sources.are_offered:
            await asyncio.gather(self.copied(), self.live_sources.withdrawn())
        else:
            await self.copied()

    async def settled(self) -> None:
        """Wait until the snapshots' memory is there, and they are copied and replicated."""
        await _ended(self._reserving)
        await self.copied()
        await _ended(self._replicating)

    async def stop(self) -> None:
        """Cancel allocating, copying and replicating. Nobody reads engines afterwards."""
        tasks = [task for task in (self._copying, self._replicating) if task]
        for task in tasks:
            task.cancel()
        others = _give_up(self._reserving, 0), self.host_copies.stop(), self.live_sources.withdrawn()
        await asyncio.gather(*tasks, *others, return_exceptions=True)

    def choice(self, version: int, connection: Connection, engine: str) -> SourceChoice:
        """Choose the copies, and the engines that serve `version`, from which `engine` is filled."""
        return self._candidates(version, connection, engine).choose()

    async def bring_near(self, version: int, connection: Connection, engine: str) -> None:
        """Have holders copy parts that several ranks on one host of `engine` need from other hosts.

        The ranks are then filled from these copies. If a copy fails, the failure is logged, and each rank
        reads the part itself.
        """
        if (expected := self.expected) is None:
            return
        layout = _layout(connection, engine)
        hosts: defaultdict[str, list[int]] = defaultdict(list)
        for holder in self._fleet.engines[engine].holders:
            hosts[self._fleet.node(holder)].append(holder)

        def wanted(host: str) -> Wanted:
            others = _waiting(self._fleet, connection, engine).count(host) + self._begins_deltas
            shared = self._candidates(version, connection, engine).shared(host, others)
            headers = {part: SnapshotHeader(version, layout, part) for part in shared}
            return [(SnapshotPart(headers[part], its[0], expected), its[1:]) for part, its in shared.items()]

        add = partial(self._now.add, layout)
        start = self.host_copies.start
        if copies := [start(homes, parts, add) for host, homes in hosts.items() if (parts := wanted(host))]:
            await asyncio.wait(copies)  # not ended with this engine: others wait, too

    @asynccontextmanager
    async def sources(
        self, version: int, connection: Connection, engine: str
    ) -> AsyncIterator[Snapshot | None]:
        """Yield the sources for filling `engine`, or None if a part is nowhere.

        Engines serve as sources while the body runs.
        """
        choice = self.choice(version, connection, engine)
        flat = connection.flat_layouts.get(engine)
        if flat and (connection.in_place or choice.first.live):
            first = SnapshotHeader(version, flat.layout, flat.first)
            num_ranks, live = (
                len(self._fleet.engines[engine].holders),
                (choice.first.live, choice.reserve.live),
            )
            async with self.live_sources.offered(version, flat, *live) as offers:
                yield choice.snapshot(first, num_ranks, is_flat=True, live=offers)
        else:
            first = SnapshotHeader(version, _layout(connection, engine), 0)
            yield choice.snapshot(first, len(choice.first.copies), is_flat=False, live={})

    def _candidates(self, version: int, connection: Connection, engine: str) -> Candidates:
        layout, holders = _layout(connection, engine), self._fleet.engines[engine].holders
        copies = self._now.offers.get(layout, {}) if version == self._now.number else {}
        may_serve = version == self._taken and engine in connection.flat_layouts
        return Candidates(
            copies,
            self._now.hosts,
            self.live_sources.by_host(version, connection, engine) if may_serve else {},
            [self._fleet.node(holder) for holder in holders],
            mixes=connection.in_place,
        )

    async def restore(self, connection: Connection) -> int:
        """Find a previous driver's snapshots. Returns the newest version that is complete, or 0."""
        calls = {name: holder.snapshots() for name, holder in self._fleet.named_holders().items()}
        # A holder that is copying answers when the copy is done.
        outcome = await gather_named(calls, "kept", self._config.connect_timeout_s)
        found = {
            number: {snapshot_part.header: snapshot_part for snapshot_part in outcome.answers.get(name, ())}
            for number, name in enumerate(calls)
        }
        versions = {header.version for shares in found.values() for header in shares}
        ranks = _ranks(self._fleet)
        for version in sorted(versions, reverse=True):
            now = _Version(version)
            for header, homes in self._parts(version, connection, everyone=True):
                order = [*homes, *(found.keys() - set(homes))]
                having = [number for number in order if header in found[number]]
                shares = [found[number][header] for number in having]
                now.offers[header.layout][header.part] = []
                for number, share in zip(having, shares, strict=True):
                    now.add(header.layout, header.part, share.offer, self._fleet.node(number))
                for number in having[self._config.mirrors + 1 :]:
                    self.host_copies.note(number, header)
                if shares:
                    self.expected = shares[0].expected
                    if shares[0].live:
                        self.live.learn(self.expected, ranks[homes[0]][1], shares[0].live)
            if any(all(parts.values()) for parts in now.offers.values()):
                self._now = now
                return version
        return 0

    def lost(self, holder: str) -> None:
        """Forget all snapshots of a lost holder."""
        self._now.lose(holder)

    async def drop_headless(self, holders: Collection[str]) -> bool:
        """Forget copies of `holders` that have no valid header any more. Returns whether there were any."""
        headers = {
            (offer.holder, part): SnapshotHeader(self._now.number, layout, part)
            for layout, parts in self._now.offers.items()
            for part, offers in parts.items()
            for offer in offers
            if offer.holder in holders
        }
        headless = await self._checks.without_header(headers)
        self._now.drop(headless)
        return bool(headless)

    async def drop_damaged(self, connection: Connection, engine: str, read: Collection[str]) -> str:
        """Forget damaged copies, since `engine` holds wrong bytes. It was filled from the holders in `read`.

        Returns a holder in `read` whose copy was damaged, or "".
        """
        layout, flat = _layout(connection, engine), connection.flat_layouts.get(engine)
        version, copies, damaged = self._now.number, self._now.offers.get(layout, {}), list[Copy]()
        if not connection.in_place:
            assert self.expected is not None
            damaged = await self._checks.unlike_version(version, layout, copies, self.expected)
        elif flat:
            ranks = dict(enumerate(self._fleet.engines[engine].holders, start=flat.first))
            damaged = await self._checks.like_memory(version, layout, copies, ranks)
        self._now.drop(damaged)
        # Another engine may have read the same copy, and found it damaged, meanwhile.
        return next((holder for holder, part in self._now.damaged if holder in read and part in copies), "")

    def _parts(
        self, version: int, connection: Connection, everyone: bool = False
    ) -> Iterator[tuple[SnapshotHeader, list[int]]]:
        """Yield each part and the holders that have it, one per host whose engines serve it.

        `everyone`: include engines that do not serve `version`.
        """
        if not connection.in_place:
            for trainer, (_, home) in enumerate(self._fleet.trainers):
                yield SnapshotHeader(version, connection.content, trainer), [home]
            return
        for flat in dict.fromkeys(connection.flat_layouts.values()):
            hosts: dict[str, tuple[int, ...]] = {}
            for name, member in self._fleet.engines.items():
                serves = (member.record.state, member.record.version) == (EngineState.SERVING, version)
                if connection.flat_layouts.get(name) == flat and (everyone or serves):
                    hosts.setdefault(self._fleet.node(member.holders[0]), member.holders)
            copies = [*hosts.values()][: self._config.mirrors + 1]
            for rank, homes in enumerate(zip(*copies, strict=True)):
                yield SnapshotHeader(version, flat.layout, flat.first + rank), list(homes)

    async def _copy(self, version: int, connection: Connection, expected: Fingerprint) -> None:
        await asyncio.sleep(_LATER_S)
        await _ended(self._reserving)  # else holders would allocate it here, in the deadline of a copy
        if self._replicating:  # the snapshots that it reads are about to be replaced
            self._replicating.cancel()
        parts = [(header, home) for header, homes in self._parts(version, connection) for home in homes]
        is_flat, ranks = connection.in_place, _ranks(self._fleet)
        are_live = is_flat and self.live.right
        live = {header: self.live.of(*ranks[home]) if are_live else None for header, home in parts}
        calls = {
            f"holder {home}": self._fleet.holders[home].snapshot(header, is_flat, expected, live[header])
            for header, home in parts
        }
        offers, now = await self._keep(version, calls), _Version(version)
        homes: dict[SnapshotHeader, list[int]] = {}
        for header, home in parts:
            now.offers[header.layout].setdefault(header.part, [])
            if offer := offers.get(f"holder {home}"):
                now.add(header.layout, header.part, offer, self._fleet.node(home))
                homes.setdefault(header, []).append(home)
        self._now = now
        num_planned = connection.plan.members.num_holders  # holders added later have no snapshots
        self._replicating = asyncio.create_task(self._replicate(now, homes, num_planned, expected, live))

    async def _keep(self, version: int, calls: Mapping[str, Awaitable[T]]) -> Mapping[str, T]:
        """Have holders keep `version` in place of the previous version. Returns the answers."""
        outcome = await gather_named(calls, "keep", self._config.timeout_s)
        if self.host_copies.made:
            await self.host_copies.free()
        for error in outcome.failures.values():
            logger.warning("[driver · v%d] a snapshot is missing: %s", version, error)
            _tell(self._events, error)
        return outcome.answers

    async def _keep_staged(self, staged: StagedVersion) -> None:
        await asyncio.sleep(_LATER_S)
        calls = {f"holder {i}": self._fleet.holders[i].keep_staged(staged.version) for i in staged.parts}
        kept, now = await self._keep(staged.version, calls), _Version(staged.version)
        for home, parts in staged.parts.items():
            for each in parts:
                now.offers[staged.layout].setdefault(each.part, [])
                if f"holder {home}" in kept:
                    now.add(staged.layout, each.part, each.offer, self._fleet.node(home))
        self._now = now

    async def _replicate(
        self,
        now: _Version,
        homes: Mapping[SnapshotHeader, Sequence[int]],
        num_holders: int,
        expected: Fingerprint,
        live: Mapping[SnapshotHeader, LiveDigest | None],
    ) -> None:
        nodes = [self._fleet.node(i) for i in range(num_holders)]
        for header, kept_on in homes.items():
            held = {self._fleet.node(home) for home in kept_on}
            others = [i for i in range(num_holders) if nodes[i] not in held]
            offers = now.offers[header.layout][header.part]
            if not offers:
                continue  # the holder was lost meanwhile
            snapshot_part = SnapshotPart(header, offers[0], expected, live[header])
            for step in range(min(self._config.mirrors + 1 - len(held), len(others))):
                place = others[(header.part + step) % len(others)]
                call = self._fleet.holders[place].replicate(snapshot_part, self._config.timeout_s)
                limit_s = self._config.timeout_s + GRACE_S
                outcome = await gather_named({f"holder {place}": call}, "replicate", limit_s)
                for error in outcome.failures.values():
                    about = "[holder %d · v%d] does not replicate part %d: %s"
                    logger.warning(about, place, header.version, header.part, error)
                    _tell(self._events, error)
                for offer in outcome.answers.values():
                    now.add(header.layout, header.part, offer, nodes[place])


def _ranks(fleet: Fleet) -> Mapping[int, tuple[str, int]]:
    """Return the engine and the rank's number that each holder serves."""
    engines = fleet.engines.items()
    return {home: (name, rank) for name, its in engines for rank, home in enumerate(its.holders)}


def _waiting(fleet: Fleet, connection: Connection, engine: str) -> list[str]:
    """Return the host of each rank that still needs copies, of all engines but `engine`."""
    return [
        fleet.node(holder)
        for name, member in fleet.engines.items()
        if name not in (engine, *connection.flat_layouts) and member.record.state in _UNFILLED
        for holder in member.holders
    ]


def _layout(connection: Connection, engine: str) -> str:
    """Return the layout of the copies that fill `engine`, "" if none do."""
    if not connection.in_place:
        return connection.content
    flat = connection.flat_layouts.get(engine)
    return flat.layout if flat else ""


async def _give_up(task: asyncio.Task[None] | None, timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds until `task` has ended, then cancel it."""
    if task:
        await asyncio.wait([task], timeout=max(0.0, timeout_s))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task and not task.done():
        await asyncio.wait([task])


def _tell(events: Events, error: WeightSyncError) -> None:
    if isinstance(error, (DeadlineError, PeerLostError)):
        events.publish(HolderSilent())
