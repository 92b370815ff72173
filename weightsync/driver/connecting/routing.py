"""Plans the reads of engines that read the trainers' memory directly, and keeps the way of each engine."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.connecting.cross_host import CrossHostExchange
from weightsync.driver.connecting.layouts import are_alike
from weightsync.driver.connecting.linking import Served
from weightsync.driver.connecting.ways import (
    FAR,
    INCOMPLETE,
    UNPLANNED,
    Broadcast,
    Direct,
    Joining,
    Later,
    Way,
    first_way,
)
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import ConfigError, VerifyError
from weightsync.plan import Layout, Plan, Reads, Reshard, same_dtype_tensors
from weightsync.plan.cross_host.cross_host_parts import Needs
from weightsync.plan.direct.alike import Alike, AlikeReads, AlikeReshard, LocalReads
from weightsync.plan.layout.coverage import covers_all
from weightsync.plan.layout.layout import join_tables
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.trainers_layout import TrainersLayout
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, RankMemory
from weightsync.protocol.messages import Forward, LoadReport, Read, Receive, UpdateTask
from weightsync.protocol.peers import SharedAlike
from weightsync.report import DIRECT

logger = logging.getLogger("weightsync.driver")

_SAME_DEVICE, _SAME_HOST, _OTHER_HOST = range(3)


class Router:
    """Routes of all engines of one connection.

    Attributes:
        ways: the way of each engine's weights.
        demoted: engines that may no longer read directly, and why.
        exchange: the messages that direct engines get from other hosts, if any.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: SyncConfig,
        plan: Plan,
        source: TrainersLayout,
        exports: Sequence[RankMemory | None],
        demoted: Mapping[str, str],
    ) -> None:
        """Make a router without engines.

        `source` is the trainers' layout. `exports` has one entry per trainer rank, None if no holder maps the
        rank's memory. `demoted` comes from the previous connection's router.
        """
        self._fleet, self._config, self._plan = fleet, config, plan
        self._source, self._exports = source, exports
        self.demoted = dict(demoted)
        self._near: defaultdict[str, list[int]] = defaultdict(list)
        for trainer, (_, holder) in enumerate(fleet.trainers):
            self._near[fleet.node(holder)].append(trainer)
        self.ways: dict[str, Way] = {}
        self.exchange: CrossHostExchange | None = None
        self._has_met = False
        self._paired: dict[tuple[Layout, bool], tuple[dict[str, str], list[Reshard]]] = {}
        self._cut: dict[tuple[Layout, int, tuple[int, ...]], tuple[_Local, Reads | None]] = {}
        self._whole: dict[tuple[Layout, int, tuple[int, ...]], tuple[AlikeReads, Mapping[int, int]]] = {}
        self._shared: dict[tuple[Layout, int], SharedAlike] = {}
        self._alike: dict[Layout, tuple[dict[str, str], AlikeReshard | None]] = {}
        self._quantising: set[str] = set()
        self._parts: list[tuple[Sequence[LayoutTable], Layout]] = []

    def join(self, name: str, joining: Joining, failed: str = "") -> None:
        """Add an engine, whose reads `plan_reads` plans. See `obstacle` for `failed`.

        Raises ConfigError if ``sync.mode`` is direct and the engine cannot read directly.
        """
        self._quantising.discard(name)
        demoted = self.demoted.get(name, "")
        self._decide(name, first_way(self._config, demoted, failed, all(self._exports), joining))

    def forget(self, engine: Layout) -> None:
        """Drop all that was planned for a layout that no engine has any more."""
        known: tuple[dict[Any, Any], ...] = self._cut, self._whole, self._shared, self._paired
        for planned in known:
            for key in [key for key in planned if key[0] is engine]:
                del planned[key]
        self._alike.pop(engine, None)

    def joining(self, name: str) -> Joining | None:
        """Return the facts about engine `name`, if it has joined and has no planned reads yet."""
        way = self.ways.get(name)
        coming = way.then if isinstance(way, Broadcast) else way
        return coming if isinstance(coming, Joining) else None

    @property
    def is_unsettled(self) -> bool:
        """Return True if an engine has no planned reads yet, or the plan lacks buckets for an engine."""
        return any(map(self.joining, self.ways)) or not self.suffices

    async def plan_reads(self, name: str) -> None:
        """Have the holders of an engine that has joined prepare its reads. Does nothing for any other.

        If this is cancelled, the next update plans the reads. Raises ConfigError as `join`.
        """
        way, joining = self.ways.get(name), self.joining(name)
        if joining and isinstance(way, Broadcast):
            self.ways[name] = replace(way, then=await self._quantised(name, joining))
        elif joining:
            self._decide(name, await self._route(name, joining.layout, joining.exports))

    async def _quantised(self, name: str, joining: Joining) -> Direct | None:
        """Have an engine's holders prepare the reads that they quantise, if they can get them."""
        live = [each for each in joining.exports if isinstance(each, LiveMemory)]
        reads = [each.reads for each in live if each.reads]
        layout = next((known for tables, known in self._parts if are_alike(reads, tables)), None)
        if layout is None:
            layout = join_tables(reads)
            self._parts.append((reads, layout))
        near = await self._route(name, layout, live, near_only=True) if covers_all(layout) else None
        if not isinstance(near, Direct):
            why = near.route if near else INCOMPLETE
            logger.info("[engine %s] takes whole tensors in each update: %s", name, why)
            return None
        self._quantising |= {name} if all(each.takes_parts for each in live) else set()
        return replace(near, route=f"{DIRECT}: {joining.converts}")

    async def meet(self) -> None:
        """Connect the hosts, after all engines were added. Raises the errors of `connect`.

        If messages do not fit in ``sync.max_staging_bytes``, engines that need them take broadcasts. Raises
        ConfigError if the plan has no buckets for these.
        """
        far = {name: way.far for name, way in self.ways.items() if isinstance(way, Direct) and way.far}
        self._cut, self._has_met = {}, True
        if not far:
            return
        needs = {holder: reads for its in far.values() for holder, reads in its.items()}
        try:
            self.exchange = CrossHostExchange(self._fleet, self._config, self._plan, needs, self._near)
        except ConfigError as error:
            for name in far:
                self._decide(name, Broadcast(str(error)))
            if not self.suffices:
                remedy = f"{error.remedy}, or set sync.mode to broadcast (engines {', '.join(far)})"
                raise ConfigError(error.field, error.value, remedy) from error
        else:
            await self.exchange.open()

    def _decide(self, name: str, way: Way) -> None:
        self.ways[name] = way
        if isinstance(way, Broadcast) and self._config.mode == DIRECT:
            raise ConfigError("sync.mode", DIRECT, f"engine {name}: {way.route}; auto takes what there is")
        if isinstance(way, Broadcast) and self._config.mode == "auto":
            logger.info("[engine %s] takes broadcasts: %s", name, way.route)

    def demote(self, name: str, error: VerifyError) -> None:
        """If ``mode`` is auto, have engine `name`, whose tensors were wrong, take broadcasts."""
        if self.reads_directly(name) and self._config.mode == "auto":
            logger.warning("[engine %s] takes broadcasts from now on: %s", name, error)
            self.demoted[name] = f"what it read was wrong: {error}"
            self.ways[name] = Broadcast(self.demoted[name])

    def reads_directly(self, name: str) -> bool:
        """Return True if engine `name` reads the trainers' memory in the next update."""
        return isinstance(self.ways.get(name), Direct)

    def note(self, loaded: Mapping[str, LoadReport]) -> None:
        """Note which engines that quantise can read directly from the next update on."""
        self._quantising |= {name for name, report in loaded.items() if report.takes_parts}

    @property
    def suffices(self) -> bool:
        """Return True if no engine takes broadcasts, or the plan has buckets."""
        return self._plan.slots > 0 or not any(isinstance(way, Broadcast) for way in self.ways.values())

    @property
    def routes(self) -> dict[str, str]:
        """The ways in words, see `SyncReport.routes`."""
        return {name: way.route for name, way in self.ways.items()}

    def tasks(self, takers: Mapping[str, Sequence[int]], frozen: bool = True) -> dict[int, UpdateTask]:
        """Return the update task of each holder, for an update of the engines `takers`.

        `takers` gives each engine's holders. Without `frozen`, frozen tensors stay as they are. Holders that
        are not in the result have nothing to do.
        """
        for name in self._quantising.intersection(takers):
            if isinstance(way := self.ways[name], Broadcast) and isinstance(way.then, Direct):
                self.ways[name] = way.then
        direct = {name: way for name in takers if isinstance(way := self.ways[name], Direct)}
        reading = {i for name in direct for i in takers[name]}
        receiving = {i for holders in takers.values() for i in holders} - reading
        cast = frozenset[int]().union(*(way.cast for way in direct.values()))
        # Every member of a communicator has to take part in its exchange.
        crosses = any(way.far for way in direct.values())
        exchanging = {*self.exchange.members} if self.exchange and crosses else set[int]()
        sent = None if receiving else cast

        def task(holder: int) -> UpdateTask:
            exchanges = holder in exchanging
            if holder in reading:
                return Read(sent, exchanges, frozen, cast)
            return (Receive if holder in receiving else Forward)(sent, exchanges, frozen)

        num_holders = self._plan.members.num_holders
        members = range(num_holders) if receiving or cast else sorted(reading | exchanging)
        return {holder: task(holder) for holder in members}

    async def _route(
        self, name: str, engine: Layout, exports: Served, near_only: bool = False
    ) -> Direct | Later | Broadcast:
        """Have each rank's holder map the memory it reads. Returns `Broadcast` if it cannot.

        With `near_only`, nothing may come from other hosts or by broadcasts.
        """
        holders, devices = self._fleet.engines[name].holders, [each.device for each in exports if each]
        distances = [self._distances(holder, device) for holder, device in zip(holders, devices, strict=True)]
        some_far = any(_OTHER_HOST in near for near in distances)
        if near_only and some_far:
            return Broadcast(FAR)
        reasons, alike = self._pair_alike(name, engine) if some_far else ({}, None)
        reshards: list[Reshard] = []
        if not alike:
            # All bytes that cross hosts are sent, frozen tensors too.
            apart = not any(_OTHER_HOST in near for near in distances)
            reasons, reshards = self._pair(name, engine, apart)
            if not reshards or (near_only and reasons):
                return Broadcast(next(iter(reasons.values())))
        local: dict[int, _Local] = {}
        far: dict[int, Needs] = {}
        for rank, (holder, near) in enumerate(zip(holders, distances, strict=True)):
            remote: Needs | None = None
            if alike:
                local[holder], remote = self._split_alike(engine, alike, rank, near)
            elif _OTHER_HOST in near:
                local[holder], remote = self._split(engine, reshards[0], rank, near)
            else:
                # Another first trainer for each holder, to spread the load.
                start = holder * len(self._exports) // len(self._fleet.holders)
                local[holder] = _Local.of([each.reads(rank, near, start=start) for each in reshards])
            if remote is not None:
                far[holder] = remote
        if self._has_met:
            if max(far, default=-1) >= self._plan.members.num_holders:
                return Later()
            if not self.exchange.agrees(holders, far) if self.exchange else far:
                return Broadcast(UNPLANNED)
        calls = {
            f"holder {holder}": self._fleet.holders[holder].route(
                its.reads, self._memory(its.by_trainer), its.alike
            )
            for holder, its in local.items()
        }
        outcome = await gather_named(calls, "route", self._config.connect_timeout_s)
        for error in outcome.failures.values():
            return Broadcast(str(error))
        return Direct([its.by_trainer for its in local.values()], far, self._buckets(reasons.keys()))

    def _pair(self, name: str, engine: Layout, apart: bool) -> tuple[dict[str, str], list[Reshard]]:
        """Pair an engine's layout with the trainers', for all that equal it.

        Returns why tensors are left out, and one `Reshard`. With `apart`, frozen tensors have a second one.
        """
        if (engine, apart) not in self._paired:
            names, reasons = same_dtype_tensors(self._source.stated, name, engine)
            frozen = names & {self._plan.tensors[i].name for i in self._plan.frozen} if apart else frozenset()
            parts = [names - frozen, frozen] if frozen < names else [names]
            made = [Reshard(self._source.whole, name, engine, only=part) for part in parts if part]
            self._paired[engine, apart] = reasons, made
        return self._paired[engine, apart]

    def _pair_alike(self, name: str, engine: Layout) -> tuple[dict[str, str], AlikeReshard | None]:
        """Pair as `_pair`, in kinds of tensors, for engines that read from other hosts."""
        if engine not in self._alike:
            names, reasons = same_dtype_tensors(self._source.stated, name, engine)
            found = AlikeReshard.of(self._source, name, engine, names) if names else None
            self._alike[engine] = reasons, found
        return self._alike[engine]

    def _distances(self, holder: int, device: str) -> list[int]:
        """Return the distance of each trainer from an engine rank, as `Reshard.reads` takes it."""
        near = [_OTHER_HOST] * len(self._exports)
        for trainer in self._near.get(self._fleet.node(holder), ()):
            export = self._exports[trainer]
            same_device = export is not None and export.device == device
            near[trainer] = _SAME_DEVICE if same_device else _SAME_HOST
        return near

    def _split(
        self, engine: Layout, reshard: Reshard, rank: int, near: Sequence[int]
    ) -> tuple[_Local, Reads | None]:
        """Split a rank's reads into reads from its own host and from other hosts, if any.

        All ranks start with the same trainer, so that messages can be shared. Engines of equal layout that
        are equally far from all trainers have the same objects: members get and plan these once.
        """
        key = engine, rank, tuple(near)
        if key not in self._cut:
            whole = reshard.reads(rank, near, start=0)
            is_far = np.array(near)[whole.trainer] == _OTHER_HOST
            local = _Local.of([whole.take(np.flatnonzero(~is_far))])
            self._cut[key] = local, whole.take(np.flatnonzero(is_far)) if is_far.any() else None
        return self._cut[key]

    def _split_alike(
        self, engine: Layout, reshard: AlikeReshard, rank: int, near: Sequence[int]
    ) -> tuple[_Local, AlikeReads | None]:
        """Split reads like `_split`, by kinds of tensors. The second result has the reads from all hosts.

        So engines of equal layout share one object on all hosts.
        """
        key = engine, rank, tuple(near) if reshard.has_replicas else ()
        if key not in self._whole:
            reads = reshard.reads(rank, near)
            self._whole[key] = reads, reads.by_trainer()
        whole, by_trainer = self._whole[key]
        its = {trainer: nbytes for trainer, nbytes in by_trainer.items() if near[trainer] != _OTHER_HOST}
        local = _Local.of([Reads.none()])
        if its:
            if (engine, rank) not in self._shared:
                self._shared[engine, rank] = SharedAlike(self._fleet.share(Alike.of(whole)))
            first = near.index(_SAME_DEVICE) + 1 if _SAME_DEVICE in near else 0
            local = _Local(LocalReads.of(whole, [*its], first), its, self._shared[engine, rank])
        return local, whole if len(its) < len(by_trainer) else None

    def _memory(self, trainers: Collection[int]) -> dict[int, DeviceMemory]:
        exports = {trainer: self._exports[trainer] for trainer in sorted(trainers)}
        return {trainer: export.memory for trainer, export in exports.items() if export}

    def _buckets(self, tensors: Collection[str]) -> frozenset[int]:
        """Return the buckets that contain any of `tensors`."""
        numbers = {number for number, meta in enumerate(self._plan.tensors) if meta.name in tensors}
        buckets = self._plan.buckets() if numbers else ()
        return frozenset(b.index for b in buckets if any(piece.tensor in numbers for piece in b.pieces))


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """The reads of an engine rank from trainers on its host.

    Attributes:
        reads, alike: the reads in the form that the holder gets, see `HolderPeer.route`.
        by_trainer: the bytes from each trainer rank.
    """

    reads: LocalReads
    by_trainer: Mapping[int, int]
    alike: SharedAlike | None = None

    @classmethod
    def of(cls, parts: Sequence[Reads]) -> _Local:
        return cls(LocalReads(parts), sum((Counter(reads.by_trainer()) for reads in parts), Counter()))
