"""Rounds of moves of real Ray actors, called by the driver or through one holder of each group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.driver_ledger import Instant
from benchmarks.driver_peers import PER_HOST
from benchmarks.isolate import stage
from benchmarks.rounds import NUM_WARM, dialled, measure
from weightsync.actors.holders.weight_holder import process_options
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteHolder, remote_holder
from weightsync.actors.relays.host_moves import HostMoves, Moving
from weightsync.actors.relays.move_relay import HostMoving, MoveRelay
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.updating.moves import Moves
from weightsync.node.messages import NodeOffer
from weightsync.node.node import serve
from weightsync.protocol.messages import Moved, Read, UpdateTask
from weightsync.protocol.peers import HolderPeer
from weightsync.protocol.timing import Span

__all__ = ["measure_moves"]


class IdleHolder:
    """A holder's actor that has moved at once."""

    def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved:
        return Moved(Span("move", 1.8e9, 0.01))

    def serve_node(self, offer: NodeOffer) -> None:
        serve(offer, self, HolderPeer).welcomed.result()

    def answer_relay(self, offer: NodeOffer) -> None:
        serve(offer, self, Moving).welcomed.result()

    def relay_moves(self, offer: NodeOffer, holders: Mapping[int, ActorHandle[Any]]) -> None:
        serve(offer, HostMoves(holders), HostMoving).welcomed.result()


def _spawn_idle() -> ActorHandle[Any]:
    options = process_options(ray.get_runtime_context().get_node_id(), "", 4)
    return ray.remote(IdleHolder).options(**options).remote()


class Rounds:
    """Holders in groups of 8, which are hosts to the driver."""

    def __init__(self, num_holders: int) -> None:
        self._num_holders, self._links = num_holders, NodeLinks(None)
        self.holders: list[RemoteHolder] = []
        self.relays: list[MoveRelay] = []

    def actors(self) -> Sequence[ActorHandle[Any]]:
        return [each.handle for each in self.holders]

    async def start(self) -> None:
        """Start as many actors at once as there are cores, since an actor starts a process."""
        at_once = len(os.sched_getaffinity(0))
        for first in range(0, self._num_holders, at_once):
            stage(f"start of holder {first}")
            numbers = range(first, min(first + at_once, self._num_holders))
            new = [remote_holder(f"holder {i}", _spawn_idle()) for i in numbers]
            self.holders += new
            await dialled(self._links, new)
        stage("connecting the relays")
        indexed = dict(enumerate(self.holders))
        for first in range(0, self._num_holders, PER_HOST):
            group = {i: indexed[i] for i in range(first, min(first + PER_HOST, self._num_holders))}
            self.relays.append(MoveRelay(self._links, group))
        await dialled(self._links, self.relays)

    async def take(self, num_rounds: int) -> dict[str, Sequence[Instant]]:
        """Move in turns, both ways."""
        stage("rounds")
        fleets = {
            "the driver": Fleet([], {}, [*self.holders]),
            "holders": Fleet([], {}, [*self.holders], move_relays=[*self.relays]),
        }
        tasks = {index: Read() for index in range(self._num_holders)}
        taken: dict[str, list[Instant]] = {way: [] for way in fleets}
        for attempt in range(1, num_rounds + NUM_WARM + 1):
            for way, fleet in fleets.items():
                started = Instant.now()
                moves = Moves(fleet, attempt, tasks, 600.0)
                (await gather_named(moves.calls, "move", 600.0)).require()
                moves.close()
                taken[way].append(Instant.now() - started)
        await self._links.close()
        return {way: its[NUM_WARM:] for way, its in taken.items()}


def measure_moves(num_holders: int, num_rounds: int) -> None:
    """Let actors move, called by the driver and by holders in turns, and send a row for both."""
    about: dict[str, object] = {"holders": num_holders, "groups": -(-num_holders // PER_HOST)}
    measure(lambda: Rounds(num_holders), num_rounds, "holders that move nothing", about)
