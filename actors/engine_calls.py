"""The methods that WeightSync calls on an engine's actor."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

from weightsync.actors.ray.claim import Claimable
from weightsync.actors.ray.placement import Placement
from weightsync.config import Components, PrefixCache
from weightsync.engines import (
    CachesPrefixes,
    Engine,
    ExportsAhead,
    ExportsMemory,
    HasComponents,
    HasRankHosts,
    HasRankProcesses,
    MovesExperts,
    ServesAdapters,
    Sleeps,
)
from weightsync.engines.rank.rank_host import RankHost
from weightsync.engines.rank.rank_process import this_host
from weightsync.engines.serving.engine_digests import EngineDigests
from weightsync.errors import ConfigError, DeadlineError, RestartedError, StateError
from weightsync.faults import Fault, inject, set_faults, split_by_rank
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node, serve
from weightsync.plan import Plan
from weightsync.plan.layout.arrangement import Experts, arrangement_key
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.messages import Attached, Digests, FeedTicket, LoadReport
from weightsync.protocol.peers import EnginePeer

logger = logging.getLogger("weightsync.actors")

_LONGEST_S = 600.0
"""How long a commit waits for its turn. The driver has given it up by then."""


class EngineCalls(Claimable):
    """Base of engine actors. WeightSync makes these calls to the adapter `_engine` while requests run.

    Calls while engines do not serve are no coroutines: the actor's node makes them on its threads, past the
    actor's loop, which requests may keep busy.
    """

    _engine: Engine
    _name = ""
    _served = 0
    _slot: str | None = None
    _components: Components = MappingProxyType({})
    _layouts: Sequence[LayoutTable] | None = None
    _hosts: Sequence[RankHost] = ()
    _digests: Future[EngineDigests] | None = None
    _parts: Mapping[str, tuple[AdapterSpec, EngineCalls]] = MappingProxyType({})
    _watched: asyncio.Event | None = None
    _node: Node | None = None
    _here: Callable[[str], Placement] = staticmethod(Placement.here)

    async def sync_placements(self, _: object = None) -> list[Placement]:
        """Return the ranks' placements: the devices that their layouts name.

        The argument is an object of Ray's store. Ray calls this once the host has it.
        """
        layouts = await self.sync_layout()
        return [self._place(layout.device, rank) for rank, layout in enumerate(layouts)]

    async def sync_outline(self, components: Components = MappingProxyType({})) -> Sequence[Outline]:
        """Return the outlines of all ranks' layouts, if components are treated so."""
        tables = await self.sync_layout(components)
        return await asyncio.to_thread(lambda: [each.outline() for each in tables])

    async def sync_layout(self, components: Components | None = None) -> Sequence[LayoutTable]:
        """Return the layouts of all ranks, if components are treated so; by default as before.

        The engine is asked once: layouts only change with other `components`, and if experts moved.
        """
        async with self._asking:
            wanted = self._components if components is None else components
            if wanted != self._components and isinstance(self._engine, HasComponents):
                self._layouts = None
                await asyncio.to_thread(self._engine.use_components, wanted)
                self._components = wanted
            known = self._layouts[0].arrangement if self._layouts else None
            if known and known.key != arrangement_key(await self.sync_experts()):
                self._layouts = None
            if self._layouts is None:
                layout = self._engine.layout  # looked up here: some engines need this event loop
                self._layouts = await asyncio.to_thread(lambda: [*map(LayoutTable.of, layout())])
                if isinstance(self._engine, HasRankHosts):
                    self._hosts = await asyncio.to_thread(self._engine.hosts)
        return self._layouts

    @cached_property
    def _asking(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def sync_can_export(self) -> Sequence[bool]:
        """Return for each rank whether it can export live memory, see `ExportsMemory`."""
        if not isinstance(self._engine, ExportsMemory):
            return [False]
        return await asyncio.to_thread(self._engine.can_export)

    async def sync_export(
        self, components: Components = MappingProxyType({})
    ) -> Sequence[DeviceMemory | None]:
        """Return the ranks' exports ahead, see `ExportsAhead`; nothing if the engine does not know them."""
        if not isinstance(self._engine, ExportsAhead):
            return ()
        await self.sync_layout(components)  # a draft adds exports
        async with self._asking:  # `attach` comes afterwards
            return await asyncio.to_thread(self._engine.export)

    async def sync_attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float, prefix_cache: PrefixCache = "drop"
    ) -> Sequence[Attached]:
        """Connect ranks to holders, see `Engine.attach` and `CachesPrefixes.use_prefix_cache`."""
        layouts = await self.sync_layout()

        def attach() -> Sequence[Attached]:
            with self._turn("attach", timeout_s, "_attaching"):
                inject("connect")
                attached = self._engine.attach(plan, tickets, timeout_s)
                if isinstance(self._engine, CachesPrefixes):
                    self._engine.use_prefix_cache(prefix_cache)
                return attached

        attached = await asyncio.to_thread(attach)

        def prepare() -> EngineDigests:
            digests = EngineDigests(plan, layouts)
            digests.attach(attached)
            return digests

        # The first load waits for it, not the driver: an engine that joins is to serve soon.
        self._digests = on_daemon(prepare, "weightsync-digests")
        return attached

    def sync_pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens. Afterwards no rank reads weights, see `Engine.pause`."""
        with self._turn(f"pause ({mode})", timeout_s):
            inject("pause")
            self._engine.pause(mode, timeout_s)

    def sync_sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the GPU memory of weights and caches, see `Sleeps.sleep`."""
        if not isinstance(self._engine, Sleeps):
            raise ConfigError("sleep", type(self._engine).__name__, "this engine cannot sleep: leave it out")
        with self._turn("sleep", timeout_s):
            self._engine.sleep(level, mode, timeout_s)

    def sync_load(self, attempt: int, timeout_s: float) -> LoadReport:
        """Take one attempt's weights, see `Engine.load`."""
        return self._attached_digests.report(self._engine.load(attempt, timeout_s))

    async def sync_digests(self) -> Digests:
        """Return the digests of the last load, uint64[num_ranks, num_tensors], see `EngineDigests`."""
        return self._attached_digests.table

    @property
    def _attached_digests(self) -> EngineDigests:
        assert self._digests is not None, "sync_attach() comes first"
        return self._digests.result()

    def sync_resume(self, version: int) -> None:
        """Serve `version`, see `Engine.resume`."""
        with self._turn("commit", _LONGEST_S):
            inject("commit", version=version)
            self._served = max(self._served, version)
            self._engine.resume(version)
        logger.info("[%s · v%d] serves", f"engine {self._name}".rstrip(), version)

    @contextmanager
    def _turn(self, phase: str, timeout_s: float, kind: str = "_turns") -> Iterator[None]:
        """Run the body after earlier turns of a kind. Raises DeadlineError if one does not end in time.

        Otherwise a commit that the driver gave up would end after the next pause: the engine would serve
        weights that are being written. And an attach that the driver gave up would end after the next one:
        the engine would read from the holders of a connection that has ended.
        """
        turns: threading.Lock = vars(self).setdefault(kind, threading.Lock())
        if not turns.acquire(timeout=timeout_s):
            raise DeadlineError(phase, (f"engine {self._name}",), timeout_s)
        try:
            yield
        finally:
            turns.release()

    async def sync_serving(self) -> int:
        """Return the version that the engine serves, 0 while paused or before the first."""
        return self._engine.serving()

    async def sync_served(self) -> int:
        """Return the newest version that this process was told to serve, 0 before the first."""
        return self._served

    async def sync_experts(self) -> Experts:
        """Return the expert in each slot of all ranks, by layer, see `MovesExperts.experts`."""
        if not isinstance(self._engine, MovesExperts):
            return ()
        return await asyncio.to_thread(self._engine.experts)

    async def sync_move_experts(self, experts: Experts) -> None:
        """Rearrange the live experts, see `MovesExperts.move_experts`."""
        assert isinstance(self._engine, MovesExperts), "the driver only asks engines that have experts"
        await asyncio.to_thread(self._engine.move_experts, experts)

    async def sync_live_digests(self) -> LoadReport:
        """Digest the live memory, see `MovesExperts.live_digests`."""
        assert isinstance(self._engine, MovesExperts), "the driver only asks engines that have experts"
        return self._attached_digests.report(await asyncio.to_thread(self._engine.live_digests))

    async def sync_serve_node(self, offer: NodeOffer) -> None:
        """Have a node answer the driver's calls. Raises as `Node.serve` if the driver is not reached."""
        if self._node:  # of a driver that died, or of a link that has ended
            self._node.stop()
        self._node = serve(offer, Methods(self), EnginePeer, asyncio.get_running_loop())
        await asyncio.wrap_future(self._node.welcomed)

    async def sync_open_adapter(self, spec: AdapterSpec) -> str:
        """Prepare to be called with `sync_adapter`. An adapter of that name is closed first.

        Returns the dtype of the adapter's slots.
        """
        if not isinstance(self._engine, ServesAdapters):
            remedy = (
                "serve adapters with vLLM or SGLang in an EngineActor or a server: other engines "
                "have no slots that updates write"
            )
            raise ConfigError("adapter", type(self._engine).__name__, remedy)
        async with self._asking:
            part = _AdapterPart()
            part._engine = await asyncio.to_thread(self._engine.open_adapter, spec)
            part._name = f"{self._name} adapter {spec.name}".lstrip()
            part._slot, part._here = f"pid-{os.getpid()}", self._here
            self._parts = {**self._parts, spec.name: (spec, part)}
        layouts = await part.sync_layout()
        return layouts[0].rank_layout().tensors[0].dtype

    async def sync_keep_adapter(self, spec: AdapterSpec) -> None:
        """Open an adapter unless it is open: a process that replaced another process has no slots yet."""
        if self._spec(spec.name) != spec:
            await self.sync_open_adapter(spec)

    async def sync_close_adapter(self, spec: AdapterSpec) -> None:
        """Give the slots back, if the adapter of that name is still this one. Safe to call twice."""
        async with self._asking:
            if isinstance(self._engine, ServesAdapters) and spec == self._spec(spec.name):
                await asyncio.to_thread(self._engine.close_adapter, spec.name)
                self._parts = {name: part for name, part in self._parts.items() if name != spec.name}

    async def sync_adapter(self, spec: AdapterSpec, method: str, *args: Any) -> Any:  # noqa: ANN401
        """Call a ``sync_…`` method of one adapter, with the adapter's own plan, holders and version.

        The first call, a claim, opens the adapter if need be. Raises StateError if it was closed, and to the
        heartbeat RestartedError: the driver ends its heartbeats before it closes an adapter.
        """
        if method == "sync_claim":
            await self.sync_keep_adapter(spec)
        if self._spec(spec.name) != spec:
            raise RestartedError if method == "sync_ping" else _no_slots(spec.name)
        answer = getattr(self.sync_part(spec.name), method)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    def sync_part(self, name: str) -> EngineCalls:
        """Return an adapter's part. Raises StateError if the adapter was closed."""
        if name not in self._parts:
            raise _no_slots(name)
        return self._parts[name][1]

    def _spec(self, name: str) -> AdapterSpec | None:
        return self._parts[name][0] if name in self._parts else None

    async def sync_watch(self) -> None:
        """Wait until the claim ends, or for the next such call. Ray fails it as soon as this process ends."""
        self._end_watch()
        self._watched = watched = asyncio.Event()
        await watched.wait()

    def sync_release(self, run: str) -> None:
        """End the claim, as `Claimable.sync_release`, and waiting calls: Ray does not end a busy actor."""
        super().sync_release(run)
        if self._claim is None:
            self._end_watch()

    def _end_watch(self) -> None:
        if self._watched:
            self._watched.set()

    async def sync_set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults of the engine's processes, see `HasRankProcesses.set_faults`."""
        if isinstance(self._engine, HasRankProcesses):
            await asyncio.to_thread(self._engine.set_faults, process, faults, seed)
        else:
            set_faults(process, split_by_rank(faults, 1)[0], seed)

    async def sync_ping(self) -> None:
        """Answer the heartbeat.

        Raises RankLostError if a rank's process ended or is stopped, and RestartedError in the actor's next
        process.
        """
        self._require_claim()
        if isinstance(self._engine, HasRankProcesses):
            self._engine.check()

    def _place(self, device: str, rank: int) -> Placement:
        # With a slot, `here` does not start CUDA in this process: other ranks run in their own processes.
        slot = f"pid-{os.getpid()}" if self._slot is None else self._slot
        placement = self._here(f"{slot}.{rank}" if rank else slot)
        if self._hosts:
            placement = self._there(placement, self._hosts[rank])
        return dataclasses.replace(placement, device=device) if device else placement

    def _there(self, placement: Placement, at: RankHost) -> Placement:
        """Return a rank's placement.

        `at` is the rank's host. `placement` is this process's placement. Raises ConfigError for a rank on
        another host that Ray did not start.
        """
        if not at.node and at.host != this_host():
            remedy = f"start all ranks on {this_host()}, or by vLLM's executor ray: each needs a holder there"
            raise ConfigError("llm", f"a rank on {at.host}", remedy)
        if at.node in ("", placement.node):
            return placement
        return Placement(at.node, at.address, placement.device, at.pid)


class _AdapterPart(EngineCalls):
    """An adapter of an engine, with its own plan, holders and version."""

    def _require_claim(self) -> None:
        """Require none: in an actor's next process there are no parts yet, and servers are not claimed."""


class Methods:
    """The methods of an engine's actor, under the names that the driver calls."""

    def __init__(self, actor: EngineCalls) -> None:
        self._actor = actor

    def part(self, name: str) -> Methods:
        return Methods(self._actor.sync_part(name))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._actor, f"sync_{method}")
        return found


def _no_slots(adapter: str) -> StateError:
    return StateError(f"adapter {adapter} has no slots here: register it again")
