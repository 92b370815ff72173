"""A checkpoint engine for verl, which imports this module if configured::

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: weightsync
      custom_backend_module: weightsync.plugins.verl
      engine_kwargs: {weightsync: {transport: nccl, timeout_s: 600}}

verl's class documents the methods. Actor rank 0 sends, every rollout rank receives and verifies. verl's
default trainer ignores this setting: use `separate_async`, see docs/verl.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from weightsync.collectives.tensor_stream import TensorStream
from weightsync.config import Ports, parse_ports
from weightsync.errors import StateError
from weightsync.plugins.sender import device_of
from weightsync.protocol.decoding import decoded
from weightsync.transports import Transport, transport_class
from weightsync.transports.store import NetworkStore, StoreServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank of a communicator. Ranks with the same `epoch` are in the same communicator."""

    epoch: str
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """A rank's current communicator, and from actor rank 0 the address for the rendezvous."""

    place: _Place | None
    meeting: str


@CheckpointEngineRegistry.register("weightsync")
class WeightSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """Sends and receives weights for verl. Updates of the same ranks reuse the communicator.

    Args:
        bucket_size: bytes of a bucket; an update uses two.
        is_master: True for actor rank 0.
        transport: ``nccl``, ``gloo``, or ``auto``, which is nccl if there is a GPU.
        timeout_s: seconds for one bucket, and for all ranks to join.
        ports: the range of the ports at which ranks meet, such as ``29600-29699``; by default any free ports.

    Raises:
        ConfigError: no such transport or range, or every port of the range is in use.
        TransportError, VerifyError: an update failed. The next update makes a new communicator.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        transport: str = "auto",
        timeout_s: float = 600.0,
        ports: Ports | str | None = None,
    ) -> None:
        if transport == "auto":
            transport = "nccl" if torch.cuda.is_available() else "gloo"
        self._transport_name, self._transport_class = transport, transport_class(transport)
        self._bucket_nbytes, self._is_master, self._timeout_s = bucket_size, is_master, timeout_s
        self._ports = parse_ports(ports) if ports else None
        self._server: StoreServer | None = None
        self._meeting = ""
        self._place: _Place | None = None
        self._transport: Transport | None = None
        self._stream: TensorStream | None = None

    @property
    def epoch(self) -> str:
        """Unique name of the current communicator; empty without a communicator."""
        return self._place.epoch if self._place else ""

    def prepare(self) -> _Ready:
        if self._is_master and self._server is None:
            self._server = StoreServer(_own_address(), self._ports)
            self._meeting = self._server.address
        return _Ready(self._place, self._meeting)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[_Ready]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        num_ranks = 1 + rollout_world_size
        places = [ready.place for ready in (metadata[0], *metadata[actor_wg_world_size:])]
        epoch = places[0].epoch if places[0] else ""
        if places != [_Place(epoch, rank, num_ranks) for rank in range(num_ranks)]:
            epoch = uuid4().hex

        def arguments(ranks: Sequence[int]) -> dict[str, list[Any]]:
            same = {"num_ranks": num_ranks, "epoch": epoch, "meeting": metadata[0].meeting}
            return {"rank": list(ranks), **{key: [value] * len(ranks) for key, value in same.items()}}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(range(1, num_ranks))

    def init_process_group(self, rank: int, num_ranks: int, epoch: str, meeting: str) -> None:
        place = _Place(epoch, rank, num_ranks)
        if self._place == place:
            return
        self._leave()
        if rank < 0:
            self._place = place
            return
        self._transport = self._transport_class()
        store = NetworkStore(meeting, self._timeout_s)
        try:
            if rank == 0:
                rendezvous = self._transport.offer(_own_address(), self._ports)
                store.set(epoch, rendezvous)
            else:
                rendezvous = decoded(bytes.decode, store.get(epoch), "a rendezvous")
        finally:
            store.close()
        self._transport.open(rendezvous, rank, num_ranks, self._timeout_s)
        device = device_of(self._transport_name)
        self._stream = TensorStream(self._transport, rank, num_ranks, device, self._bucket_nbytes)
        self._place = place

    def finalize(self) -> None:
        """Do nothing: buckets are freed when an update ends, and the communicator stays open."""

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> None:
        if self._place and self._place.rank < 0:  # rank 0 sends; making a tensor may be collective
            async for _ in ensure_async_iterator(weights):
                pass
            return
        try:
            with self._opened().sending(global_steps or 0) as put:
                async for name, weight in ensure_async_iterator(weights):
                    put(name, weight)
        except BaseException:
            self._leave()
            raise

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        batches = self._opened().receiving()
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                for name, weight in batch:
                    yield name, weight
        except BaseException:
            batches.close()
            self._leave()
            raise

    def _opened(self) -> TensorStream:
        if self._stream is None:
            raise StateError("call init_process_group first")
        return self._stream

    def _leave(self) -> None:
        self._place = self._stream = None
        if self._transport:
            self._transport.close()
            self._transport = None


def _own_address() -> str:
    return str(ray.util.get_node_ip_address()).strip("[]")
