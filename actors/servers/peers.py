"""The methods of processes that Ray did not start. Nodes of actors answer fewer methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weightsync.actors.ray.placement import Placement
from weightsync.config import Ports, TlsFiles
from weightsync.errors import WeightSyncError
from weightsync.faults import Fault
from weightsync.node.messages import NodeOffer
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer


class Process(Protocol):
    """Any of these processes. `watch` waits until the process ends."""

    async def watch(self) -> None: ...
    async def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None: ...


class ServedHolder(HolderPeer, Process, Protocol):
    """A holder's process beside a server."""

    async def ready(self) -> tuple[str, str, Ports | None, TlsFiles | None]: ...


class StartsHolders(Protocol):
    """A process that starts and ends the processes of its holders, by numbers that the driver gives."""

    async def start_holder(
        self,
        number: int,
        name: str,
        placement: Placement,
        transport: str,
        ports: Ports | None,
        offer: NodeOffer,
    ) -> None: ...
    async def end_holder(self, number: int) -> None: ...


class ServedEngine(EnginePeer, Process, StartsHolders, Protocol):
    """An engine in a server. Its adapters are parts, with the same methods, see `EngineCalls`."""

    async def placements(self, there: object = None) -> list[Placement]: ...
    async def ping(self) -> None: ...
    async def open_adapter(self, spec: AdapterSpec) -> str: ...
    async def keep_adapter(self, spec: AdapterSpec) -> None: ...
    async def close_adapter(self, spec: AdapterSpec) -> None: ...


class ServedTrainer(TrainerPeer, StartsHolders, Protocol):
    """A trainer rank. `begin` waits until the rank is in `update`. `end` ends that.

    Adapters of the model are parts, with the same methods, see `TrainerShard`.
    """

    async def placement(self) -> Placement: ...
    async def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None: ...
    async def open_adapter(self, name: str, adapter: str) -> AdapterSpec: ...
    async def cast_adapter(self, name: str, dtype: str) -> None: ...
    async def close_adapter(self, name: str) -> None: ...
    async def ping(self) -> None: ...
    async def begin(self) -> None: ...
    async def end(self, version: int, error: WeightSyncError | None) -> None: ...
