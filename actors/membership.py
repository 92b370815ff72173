"""Adds and removes the trainers, engines and holders of a fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from weightsync.actors.checkpoints.checkpoints import Checkpoints
from weightsync.actors.holders.holder_processes import SharedProcesses
from weightsync.actors.holders.holders import Holders
from weightsync.actors.lost_engines import LostEngines, has_new_link
from weightsync.actors.ray.adoption import Adoption
from weightsync.actors.ray.claim import Claims, TakenError
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.placement import Placement, check_runs, check_versions, place_ranks
from weightsync.actors.ray.publish_relay import publish_relays
from weightsync.actors.ray.remote import (
    Remote,
    RemoteEngine,
    RemoteHolder,
    RemoteTrainer,
    remote_engine,
    remote_trainer,
)
from weightsync.actors.ray.watch import Watches
from weightsync.actors.servers.door import Door
from weightsync.actors.servers.handle import EngineHandle, JoinedServer
from weightsync.actors.servers.rank import JoinedRank, TrainerHandle, in_update
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, PeerError, PeerLostError, PlanError, StateError, WeightSyncError
from weightsync.node.link import Link
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.peers import TrainerPeer
from weightsync.report import SyncReport

logger = logging.getLogger("weightsync.actors")


class Membership:
    """Keeps `fleet` in step with the registered actors.

    Attributes:
        trainers, engines: the registered actors, ranks and servers, in rank order and by name.
        models, llms: where the trainers' models and the engines are, in actors of other people's classes.
        checkpoints: registered checkpoints, which stand for trainers while there are none.
        lost: engines that stopped answering.
    """

    def __init__(
        self,
        config: SyncConfig,
        fleet: Fleet,
        controller: Controller,
        run: str | None,
        adapter: AdapterSpec | None = None,
        shared: SharedProcesses | None = None,
        door: Door | None = None,
    ) -> None:
        """
        Args:
            run: the name under which holders outlive this process, if they do.
            adapter: the adapter that is moved instead of the model.
            shared: the processes that holders share with other adapters' holders.
            door: the model's, where the adapter's processes have joined.
        """
        self._config, self._fleet, self._controller, self._adapter = config, fleet, controller, adapter
        self.trainers: list[ActorHandle[Any]] = []
        self.engines: dict[str, ActorHandle[Any]] = {}
        self.models: Adoption | None = None
        self.llms: Adoption | None = None
        self.checkpoints = Checkpoints(config)
        self._placements: dict[str, list[Placement]] = {}
        parts = config, fleet, controller
        self.lost = LostEngines(
            *parts, lambda: self.engines, self._engine, self._placements, self.place_engine
        )
        self.door = door or Door(config, self.lost.joined, self.lost.is_silent)
        self._ranks: Sequence[JoinedRank] = ()
        self._claims = Claims(run)
        self._watches = Watches(config.heartbeat_s)
        self._links = NodeLinks(config.ports, config.tls_files, self.door)
        self._holders = Holders(config, run, shared, self._links.start_holder)

    def _engine(self, name: str, handle: ActorHandle[Any]) -> RemoteEngine:
        return remote_engine(f"engine {name}", handle, self._adapter, self.llms)

    def _trainers(self) -> dict[str, RemoteTrainer]:
        named = {f"trainer {i}": handle for i, handle in enumerate(self.trainers)}
        return {name: remote_trainer(name, each, self._adapter, self.models) for name, each in named.items()}

    async def follow(self) -> None:
        """Start processes of holders where the registered actors run, in the background. Raises nothing."""

        async def ask(trainer: RemoteTrainer) -> list[Placement]:
            placement = await trainer.placement_so_far()
            return [placement] if placement else []

        self._expect(self.engines)
        engines = [self._engine(name, handle) for name, handle in self.engines.items()]
        self._holders.follow(
            {each.handle: partial(ask, each) for each in self._trainers().values() if not _is_rank(each)},
            {each.handle: each.placements for each in engines if not isinstance(each.handle, JoinedServer)},
        )

    def _expect(self, engines: Mapping[str, object]) -> None:
        """Let the servers among `engines`, and all trainer ranks that Ray did not start, join."""
        if not self._adapter:
            self._links.expect(engines, self._ranks or self.trainers)

    def register_trainers(self, trainers: Sequence[TrainerHandle]) -> None:
        """Set the trainers of the model. Raises as `expect_ranks`."""
        self.trainers = [*_same(trainers, self._ranks)]

    def expect_ranks(self, trainers: Sequence[TrainerHandle]) -> Sequence[TrainerHandle]:
        """Let the trainers of an adapter join, if Ray did not start them. Returns those that join already.

        Raises ConfigError for another number of ranks: each process is a rank of one trainer.
        """
        known = self._ranks or [each for each in self.trainers if isinstance(each, JoinedRank)]
        found = _same(trainers, known)
        self._ranks = [each for each in found if isinstance(each, JoinedRank)] or self._ranks
        self._expect(self.engines)
        return found

    def knows(self, name: str, handle: EngineHandle) -> bool:
        """Return True if engine `name` is connected, with the present process of `handle`."""
        return self.engines.get(name) == handle and not has_new_link(self._fleet.engines.get(name))

    @property
    def has_new_ranks(self) -> bool:
        """Return True if a rank has joined again, or may, since it was connected."""
        peers = (peer for peer, _ in self._fleet.trainers)
        return any(isinstance(peer, Remote) and peer.has_new_link for peer in peers)

    async def reconnect(self) -> None:
        """Connect again if a holder was lost or added since the last connect."""
        await self.lost.checked()
        if self.has_new_ranks:
            self._controller.connected = False
        if not self._controller.connected and self._controller.plan is not None:
            await self.connect()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the exclusive lock for an update, with trainers that Ray did not start in `update`.

        Raises as `in_update`.
        """
        now = self._controller
        ranks = {str(each): each for each in self.trainers if now.plan and isinstance(each, JoinedRank)}
        if ranks:
            self._expect({})
        timeout_s = self._config.connect_timeout_s
        async with in_update(ranks, lambda: now.version, timeout_s, self._linked), now.exclusive():
            yield

    def _linked(self) -> dict[str, Link]:
        """Return the links of the connected trainers, by name."""
        peers = (peer for peer, _ in self._fleet.trainers if isinstance(peer, Remote))
        return {peer.name: peer.node for peer in peers if peer.node}

    async def register_checkpoint(
        self,
        name: str,
        files: Sequence[str],
        nodes: Sequence[str],
        exclude: Collection[str],
        stored: bool,
        draft: Sequence[str],
    ) -> None:
        """Start reading a checkpoint, and start standby holders at the same time.

        Raises as `Checkpoints.register`, and ConfigError for unknown or repeated hosts.
        """
        self._controller.connected = self._controller.connected and bool(self.checkpoints or self.trainers)
        gpus = {each["NodeID"]: int(each["Resources"].get("GPU", 0)) for each in ray.nodes()}
        for node in nodes:
            if node not in gpus or nodes.count(node) > 1:
                raise ConfigError("nodes", nodes, f"give each host once: {', '.join(gpus)}")
        if not self._fleet.holders:
            for node in nodes:
                self._holders.standby(node, gpus.get(node, 0), len(self.engines))
        await self.checkpoints.register(name, files, nodes, exclude, stored, draft)

    async def place_engine(self, name: str, handle: ActorHandle[Any]) -> None:
        """Wait for the engine, then assign or start a holder for each rank."""
        if self._controller.plan is None:
            raise StateError("call connect() first")
        self._expect({name: handle})
        engine, process = self._engine(name, handle), f"engine {name}"
        asked = {process: _placements_of(self._claims, engine)}
        started = await gather_named(asked, "start", self._config.connect_timeout_s)
        placements = started.require()[process]
        others = {f"engine {live}": self._placements[live] for live in self._fleet.live() if live != name}
        check_versions(others | {process: placements})
        place_ranks({}, others | {process: placements})
        async with self._controller.update_lock.shared(name):
            left = self._placements.get(name, [])
            holders = tuple(
                self._place_rank(placement, left[rank] if rank < len(left) else None)
                for rank, placement in enumerate(placements)
            )
            if not {*holders} <= {*self._controller.plan.members.receivers}:
                self._controller.connected = False  # a holder that only sent receives no broadcasts yet
            self.engines[name], self._placements[name] = handle, placements
            self._fleet.engines[name] = EngineMember(engine, holders)
            self._watch(name, engine)

    def _place_rank(self, placement: Placement, left: Placement | None) -> int:
        """Return the fleet index of the holder for `placement`, starting it if needed."""
        known = self._fleet.holders
        holder = self._holders.place_late(placement, left, len(known))
        if holder not in known:
            known.append(holder)
            self._fleet.nodes.append(placement.node)
            self._watch_holder(holder)
            self._controller.connected = False  # the next update makes the communicators
        return known.index(holder)

    def _watch(self, name: str, engine: RemoteEngine) -> None:
        def lost(error: WeightSyncError) -> None:
            if isinstance(error, PeerLostError):
                self._links.end(engine.key, error)
            if self.engines.get(name) is engine.handle:
                self.lost.add(name, engine.handle, error)

        def heard() -> None:
            if self.engines.get(name) is engine.handle:
                self.lost.heard(name, engine.handle)

        self._watches.engine(engine, lost, heard)
        self._links.open(engine)

    def _watch_holder(self, holder: RemoteHolder) -> None:
        def lost(error: WeightSyncError) -> None:
            self._links.end(holder.key, error)
            if holder in self._fleet.holders:
                self._controller.connected = False
                self._controller.snapshot_index.lost(holder.name)
                self._holders.lost(holder)

        self._watches.holder(holder, lost)
        self._links.open(holder)

    async def connect(self) -> None:
        try:
            await self._connect()
            if self._controller.plan and self._holders.split(self._controller.plan):
                await self._connect()
        except PlanError as error:
            raise self.with_file(error) from error
        finally:
            if self._controller.plan is None:  # another WeightSync may connect these actors
                await self._claims.release()
        await self._claims.release(staying=[*self.trainers, *self.engines.values()])

    async def _connect(self) -> None:
        await self._controller.snapshot_index.ended()  # calls use the holders' present numbers
        await self._place()
        await self._controller.connect()

    def with_file(self, error: WeightSyncError) -> WeightSyncError:
        """Return `error`, with the file at fault added if weights come from checkpoints."""
        return error if self.trainers else self.checkpoints.with_file(error)

    async def _place(self) -> None:
        """Ask all actors for their placements and start missing holders."""
        if not self.engines or not (self.trainers or self.checkpoints):
            raise StateError("register_trainers() and register_engines() come before connect()")
        self._expect(self.engines)
        registered, members = self.engines, self._fleet.engines
        known = {n: members[n].record for n, h in registered.items() if is_connected(self._fleet, n, h)}
        records = {name: known.get(name, EngineRecord()) for name in registered}
        trainers = self._trainers()
        engines = {name: self._engine(name, h) for name, h in self.engines.items()}
        asked = {
            f"engine {name}": _placements_of(self._claims, engine)
            for name, engine in engines.items()
            if records[name].state is not EngineState.DEAD
        }
        # Engines take long to start, but those that were connected before should answer at once.
        again = known.keys() >= self.engines.keys()
        timeout_s = self._config.timeout_s if again else self._config.connect_timeout_s
        of_trainers, of_engines = await asyncio.gather(
            gather_named(
                {
                    name: _placement_of(self._claims, self._holders, each, rank)
                    for rank, (name, each) in enumerate(trainers.items())
                },
                "start",
                timeout_s,
            ),
            gather_named(asked, "start", timeout_s),
        )
        for name, error in of_engines.failures.items():
            bare = name.removeprefix("engine ")
            if bare not in known or not of_engines.answers or isinstance(error, TakenError):
                raise self.door.explained(error, self.engines[bare])
            records[bare].enter(EngineState.DEAD)
            self.lost.silent[bare] = self.engines[bare]
        ranks = [] if self.trainers else self.checkpoints.placement(of_engines.answers.values())
        placements = of_trainers.require() | {
            f"trainer {i}": placement for i, (_, placement) in enumerate(ranks)
        }
        check_runs({name: placements[name] for name in trainers})
        check_versions({name: [each] for name, each in placements.items()} | of_engines.answers)
        placed = place_ranks(placements, of_engines.answers)
        holders = await self._holders.place(placed.placements)
        for holder in holders:
            self._watch_holder(holder)
        nodes = [placements[name].node for name in trainers]
        for trainer in trainers.values():
            self._links.open(trainer)
        for gone in (each for each in self._fleet.holders if each not in holders):
            if isinstance(gone, Remote):
                self._links.end(gone.key, PeerError(gone.name, "it is not used any more"))
        self._fleet.holders[:] = holders
        self._fleet.nodes[:] = [placement.node for placement in placed.placements]
        for (rank, _), name in zip(ranks, placements, strict=False):
            rank.holder = holders[placed.holder_of[name][0]]
        peers: list[TrainerPeer] = [*trainers.values(), *(rank for rank, _ in ranks)]
        self._fleet.trainers[:] = [
            (peer, placed.holder_of[name][0]) for peer, name in zip(peers, placements, strict=True)
        ]
        homes = [holders[placed.holder_of[name][0]] for name in trainers]
        if not self._adapter:  # an adapter's holders share processes with other adapters' holders
            can_relay = not any(map(_is_rank, trainers.values()))
            self._fleet.relays[:] = publish_relays([*trainers.values()], nodes, homes) if can_relay else ()
        self._fleet.engines.clear()
        for name, engine in engines.items():
            at = placed.holder_of.get(f"engine {name}", ())
            # Keep the engine's own placements, whose pids `respawn` ends. A holder's placement may be the
            # trainer's.
            self._placements[name] = of_engines.answers.get(f"engine {name}", self._placements.get(name, []))
            self._fleet.engines[name] = EngineMember(engine, at, records[name])
            if records[name].state is not EngineState.DEAD:
                self._watch(name, engine)

    async def check_free(self, name: str) -> None:
        """Check that no engine of this name answers. Raises ConfigError."""
        member = self._fleet.engines.get(name)
        if name not in self.engines or (member and member.record.state is EngineState.DEAD):
            return
        ping = {name: self._engine(name, self.engines[name]).placements()}
        if not (await gather_named(ping, "ping", self._config.timeout_s)).failures:
            known = self._fleet.live() or self.engines
            raise ConfigError("engine", name, f"choose a name other than {', '.join(known)}")

    async def join(self, name: str, handle: ActorHandle[Any]) -> SyncReport | None:
        """Connect a new engine, and refill it if there is a snapshot that it can take.

        Raises as `connect`. The engines are then as before.
        """
        before = self.engines.pop(name, None), self._fleet.engines.pop(name, None)
        placed = self._placements.get(name, [])
        try:
            await self.place_engine(name, handle)
            try:
                await self._controller.adopt(name)
            except PlanError:  # the layout is not in the plan: make a new plan
                async with self._controller.exclusive():
                    await self.connect()
            if self._controller.version:  # else there is nothing to wait for
                await self._controller.snapshot_index.settled()  # holders may have no copy of it yet
            return await self._controller.refill(name) if self._controller.can_refill(name) else None
        except WeightSyncError:
            self.engines.pop(name, None)
            self._fleet.engines.pop(name, None)
            if before[0] is not None and before[1] is not None:
                self.engines[name], self._fleet.engines[name] = before[0], before[1]
                self._placements[name] = placed  # `respawn` ends these processes
            raise

    async def heal(self, name: str) -> SyncReport:
        """Connect and refill an engine that lives. Raises StateError if it is dead."""
        if self._fleet.engines[name].record.state is EngineState.DEAD:
            raise StateError(f"engine {name} is dead: bring another with add_engine()")
        await self._controller.adopt(name)
        return await self._controller.refill(name)

    async def part(self, name: str) -> None:
        """Remove an engine. Others of its deployment serve the version that they hold, if they are ready.

        The engine's holder stays until the next connect.
        """
        async with self._controller.update_lock.shared(name):
            gone, mates = self.engines.pop(name), {*self._fleet.together(name)} - {name}
            if not self._adapter:
                self.door.forget(gone)
            self._placements.pop(name, None)
            member = self._fleet.engines.pop(name, None)  # None before `connect`
            at = member.holders if member else ()
            calls = {f"holder {i}": self._fleet.holders[i].drop_engine() for i in at}
            await gather_named(calls, "drop", self._config.timeout_s)
            ready = [n for n in mates if self._fleet.engines[n].record.state is EngineState.READY]
            await self._controller.engine_group.go_on(ready)  # they waited for it
            await self._claims.release(staying=[*self.trainers, *self.engines.values()])
        if not member:
            await self.follow()

    async def close(self) -> None:
        """End the holders, hang up, and release the actors, so that another WeightSync can connect them."""
        self.lost.close()
        await self._controller.snapshot_index.stop()  # it would warn about holders that end
        self._holders.close()
        await self._watches.close()
        await self._links.close()
        await self._holders.ended()
        await self._claims.release()


async def _placement_of(claims: Claims, holders: Holders, trainer: RemoteTrainer, rank: int) -> Placement:
    await claims.acquire(trainer)
    placement = await trainer.placement()
    await holders.begin(placement, rank)
    return placement


async def _placements_of(claims: Claims, engine: RemoteEngine) -> list[Placement]:
    await claims.acquire(engine)
    return await engine.placements()


def is_connected(fleet: Fleet, name: str, handle: EngineHandle) -> bool:
    """Return True if engine `name` is connected, and is the actor or server `handle`."""
    member = fleet.engines.get(name)
    peer = member.peer if member else None
    return isinstance(peer, Remote) and peer.handle == handle


def _same(trainers: Sequence[TrainerHandle], known: Sequence[TrainerHandle]) -> Sequence[TrainerHandle]:
    """Return the `known` ranks in place of `trainers`, if Ray did not start these."""
    if not known or not isinstance(trainers[0], JoinedRank):
        return trainers
    if len(known) != len(trainers):
        raise ConfigError("trainers", len(trainers), f"give {len(known)}: so many ranks join already")
    return known


def _is_rank(trainer: RemoteTrainer | Remote) -> bool:
    return isinstance(trainer.handle, JoinedRank)
