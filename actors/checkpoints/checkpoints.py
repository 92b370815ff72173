"""Registered checkpoints, their reading actors, and the trainer ranks they stand for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from weightsync.actors.checkpoints.checkpoint_shard import spawn_shard
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.remote import RemoteHolder, answer
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import (
    ConfigError,
    PeerLostError,
    PlanError,
    SourceChangedError,
    WeightSyncError,
    nearest,
)
from weightsync.faults import Fault
from weightsync.plan import TensorMeta
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.protocol.handles import BufferHandle
from weightsync.protocol.messages import Attached, Digests, PublishReport, PublishTask
from weightsync.protocol.peers import SharedPlan
from weightsync.sources.checkpoint.checkpoint_store import Reading

_ANSWER_S = 1.0
"""How long hosts may take to say how far they have read."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """One checkpoint: actor and `read` call per host, in the order of shares."""

    shards: Mapping[str, ActorHandle[Any]]
    readings: Mapping[str, Any]
    tensors: Mapping[str, TensorMeta]
    origin: Mapping[str, str]


class Checkpoints:
    """The registered checkpoints by name.

    All have the same tensors and are on the same hosts.

    Attributes:
        published: the checkpoint that the next update takes.
        ranks: the trainer ranks that stand for them since the last connect.
    """

    def __init__(self, config: SyncConfig) -> None:
        self._config = config
        self._held: dict[str, _Checkpoint] = {}
        self._in_memory: set[str] = set()
        self.published = ""
        self.ranks: list[CheckpointRank] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def __getitem__(self, name: str) -> _Checkpoint:
        """Return a checkpoint. Raises ConfigError if it is not registered."""
        if name not in self._held:
            raise ConfigError("checkpoint", name, nearest(name, self._held) if self else "register it first")
        return self._held[name]

    @property
    def names(self) -> list[str]:
        """Names in the order of registration, which is also the order of reading."""
        return [*self._held]

    @property
    def wanted(self) -> str:
        """The published checkpoint, else the first."""
        return self.published if self.published in self._held else self.names[0]

    @property
    def names_in_memory(self) -> list[str]:
        """Names of checkpoints that have been read, in the order of registration."""
        return [name for name in self._held if name in self._in_memory]

    async def register(
        self,
        name: str,
        files: Sequence[str],
        nodes: Sequence[str],
        exclude: Collection[str],
        stored: bool,
        draft: Sequence[str],
    ) -> None:
        """Register a checkpoint.

        It is read after earlier ones, as the first is needed first.

        Returns when all headers are checked; raises as `CheckpointStore`.
        """
        if name in self._held or not name:
            raise ConfigError("checkpoint", name, f"choose a name other than {', '.join(self._held)}")
        for field, given in (("files", files), ("draft", draft)):
            if isinstance(given, str | os.PathLike) or (field == "files" and not given):
                raise ConfigError(field, given, "give a list of paths")
        for other, held in self._held.items():
            if [*held.shards] != [*nodes]:
                raise ConfigError("nodes", nodes, f"checkpoint {other} is on {[*held.shards]}")
        paths, drafts = ([os.path.abspath(path) for path in given] for given in (files, draft))
        shards = {
            node: spawn_shard(node, paths, share, len(nodes), tuple(exclude), stored, drafts)
            for share, node in enumerate(nodes)
        }
        try:
            calls = {f"host {node}": answer(f"host {node}", s.check.remote()) for node, s in shards.items()}
            checked = (await gather_named(calls, "check", self._config.connect_timeout_s)).require()
            tensors, origin = next(iter(checked.values()))
            metas = {meta.name: meta for meta in tensors}
            made = _Checkpoint(shards, {}, metas, origin)
            for other, held in self._held.items():
                _check_same(name, made, other, held)
        except BaseException:
            _kill(shards)
            raise
        before = {node: [held.readings[node] for held in self._held.values()] for node in nodes}
        readings = {node: shard.read.remote(before[node]) for node, shard in shards.items()}
        self._held[name] = replace(made, readings=readings)

    async def read(self, name: str) -> Reading:
        """Wait until the checkpoint is in memory on all hosts.

        The seconds are the slowest host's.

        Raises DeadlineError, which names the hosts that still read, after ``connect_timeout_s``.
        """
        calls = {f"host {node}": answer(f"host {node}", it) for node, it in self[name].readings.items()}
        outcome = await gather_named(calls, "read", self._config.connect_timeout_s)
        done = [*outcome.require().values()]
        self._in_memory.add(name)
        mapped, seconds = sum(each.mapped_nbytes for each in done), max(each.seconds for each in done)
        return Reading(sum(each.nbytes for each in done), mapped, seconds)

    def read_share(self, name: str) -> float:
        """Return how much of a checkpoint its hosts have read, from 0 to 1; 0 if a host does not answer.

        Blocks, so it is not for the event loop.
        """
        if name in self._in_memory or name not in self._held:
            return 1.0
        asked = [shard.read_share.remote() for shard in self._held[name].shards.values()]
        with suppress(RayError):
            return float(np.mean(ray.get(asked, timeout=_ANSWER_S)))
        return 0.0

    async def unregister(self, name: str) -> None:
        """Free the checkpoint's memory. Afterwards no process has it mapped."""
        shards = self[name].shards
        calls = {f"holder {i}": rank.forget(name) for i, rank in enumerate(self.ranks)}
        await gather_named(calls, "unmap", self._config.timeout_s)  # a holder that has ended maps nothing
        del self._held[name]
        self._in_memory.discard(name)
        closed = {node: answer(node, shard.close.remote()) for node, shard in shards.items()}
        await gather_named(closed, "close", self._config.timeout_s)
        _kill(shards)

    def placement(self, engines: Iterable[Sequence[Placement]]) -> list[tuple[CheckpointRank, Placement]]:
        """Make a rank per GPU or slot of the engines on reading hosts.

        Raises ConfigError for a reading host without engines.
        """
        placements = {placement.key: placement for ranks in engines for placement in ranks}
        found: list[tuple[CheckpointRank, Placement]] = []
        for node in next(iter(self._held.values())).shards:
            here = [placement for placement in placements.values() if placement.node == node]
            if not here:
                raise ConfigError("nodes", node, "no engine is on it: give the hosts that engines are on")
            found += [
                (CheckpointRank(self, node, i, len(here)), placement) for i, placement in enumerate(here)
            ]
        self.ranks = [rank for rank, _ in found]
        return found

    def with_file(self, error: WeightSyncError) -> WeightSyncError:
        """Return `error` with the tensor's file added."""
        if isinstance(error, SourceChangedError):
            origin = self[self.published].origin
            files = {_file_of(origin, name) for _, tensors in error.writers for name in tensors}
            found = SourceChangedError(error.version, error.writers, error.files or sorted(files - {""}))
            found.where = error.where
            return found
        if not isinstance(error, PlanError):
            return error
        file = next((f for held in self._held.values() if (f := _file_of(held.origin, error.parameter))), "")
        return PlanError(error.parameter, f"{error.problem}; it is in {file}") if file else error


def _file_of(origin: Mapping[str, str], tensor: str) -> str:
    """Return the file of a tensor of the plan, "" if there is none. MTP layers may be in a model's files."""
    return origin.get(tensor) or origin.get(tensor.removeprefix(DRAFT), "")


class CheckpointRank:
    """A TrainerPeer for one holder's share of each checkpoint."""

    def __init__(self, checkpoints: Checkpoints, node: str, rank: int, num_ranks: int) -> None:
        self._checkpoints, self._node = checkpoints, node
        self._place = rank, num_ranks
        self._plan: SharedPlan | None = None
        self._num_tensors = 0
        self._mapped: dict[str, str] = {}
        self.holder: RemoteHolder | None = None
        """The holder that sends this share. `Membership` sets it before the first call."""

        self._outlined: LayoutTable | None = None

    async def outline(self) -> Outline:
        self._outlined = await self.layout()
        return self._outlined.outline()

    async def layout(self) -> LayoutTable:
        outlined, self._outlined = self._outlined, None
        if outlined:
            return outlined
        layout: LayoutTable = await self._call(self._checkpoints.wanted, "layout", *self._place)
        return layout

    async def trial_handle(self) -> None:
        """Return None: holders map host memory."""

    async def attach(self, plan: SharedPlan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Let the holder map the wanted checkpoint, once read, and others read by then.

        Another checkpoint whose process is gone is skipped: an update that takes it raises the error.
        """
        self._plan, self._mapped = plan, {}
        wanted = self._checkpoints.wanted
        await self._checkpoints.read(wanted)
        await self._map(wanted)
        for name in self._checkpoints.names_in_memory:
            if name != wanted:
                with suppress(PeerLostError):
                    await self._map(name)
        return Attached(self._mapped[wanted], None)

    def ask_readable(self, readable: asyncio.Future[None]) -> None:
        """Return None: it is in host memory."""

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        """Make the published checkpoint the holder's source.

        The checkpoint is in host memory, so never `readable`.

        The first rank of a host returns fingerprints and counts for all ranks of the host.
        """
        name = self._checkpoints.published
        assert self.holder is not None
        if name not in self._mapped:  # read after the last connect
            await self._map(name)
        await self.holder.source(name, {})
        if self._place[0] == 0:
            report: PublishReport = await self._call(name, "publish")
            return report
        nothing = np.zeros(3, np.uint64)
        return PublishReport(nothing, nothing, {}, ())

    async def digests(self) -> Digests:
        """Return digests of the published checkpoint as `publish` does: from the first rank of a host."""
        table: Digests = np.zeros(self._num_tensors, np.uint64)
        if self._place[0] == 0:
            table = await self._call(self._checkpoints.published, "digests")
        return table

    async def replica_digests(self) -> Digests:
        """Return none: no two ranks hold the same box."""
        return np.zeros(0, np.uint64)

    async def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults of every checkpoint's actor on this host."""
        for name in self._checkpoints.names:
            await self._call(name, "sync_set_faults", process, faults, seed)

    async def forget(self, name: str) -> None:
        """Make the holder unmap this checkpoint."""
        self._mapped.pop(name, None)
        assert self.holder is not None
        await self.holder.source("", {name: None})

    async def _map(self, name: str) -> None:
        assert self.holder is not None
        attached = await self._call(name, "attach", self._plan, *self._place)
        self._mapped[name], self._num_tensors, export = attached
        await self.holder.source("", {name: export})

    async def _call(self, name: str, method: str, *args: object) -> Any:  # noqa: ANN401 (whatever it returns)
        shard = self._checkpoints[name].shards[self._node]
        return await answer(f"checkpoint {name} on host {self._node}", getattr(shard, method).remote(*args))


def _kill(shards: Mapping[str, ActorHandle[Any]]) -> None:
    for shard in shards.values():
        ray.kill(shard)


def _check_same(name: str, made: _Checkpoint, other: str, held: _Checkpoint) -> None:
    """Raise PlanError unless both have the same tensors: one plan serves all checkpoints."""
    for tensor in held.tensors.keys() ^ made.tensors.keys():
        here, there = (name, other) if tensor in made.tensors else (other, name)
        file = made.origin.get(tensor) or held.origin[tensor]
        raise PlanError(
            tensor, f"it is in checkpoint {here} ({file}), not in {there}: unregister {other} first"
        )
    for tensor, meta in made.tensors.items():
        known = held.tensors[tensor]
        if meta != known:
            raise PlanError(
                tensor,
                f"{meta.dtype} {meta.shape} in checkpoint {name} ({made.origin[tensor]}), {known.dtype} "
                f"{known.shape} in {other} ({held.origin[tensor]}): unregister {other} first",
            )
