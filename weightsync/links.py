"""Which bytes of an update go from where to where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weightsync.connect import Connection
from weightsync.peers import EngineSeat, Fleet
from weightsync.report import Distance, Link
from weightsync.router import DIRECT

__all__ = ["links"]


def links(connection: Connection, fleet: Fleet) -> list[Link]:
    """Of an update that all engines take; what direct readers take by broadcast beside it is left out."""
    sent = connection.plan.explain().sent
    found: list[Link] = []
    for name, seat in fleet.engines.items():
        if connection.router.routes.get(name) == DIRECT:
            found += _reads(connection, fleet, name, seat)
        else:
            found += _broadcasts(sent, fleet, name, seat)
    return found


def _reads(connection: Connection, fleet: Fleet, name: str, seat: EngineSeat) -> Iterator[Link]:
    for rank, by_trainer in enumerate(connection.router.read[name]):
        for trainer, nbytes in sorted(by_trainer.items()):
            distance = _distance(fleet, fleet.trainers[trainer][1], seat.holders[rank])
            yield Link(f"trainer {trainer}", f"engine {name} rank {rank}", distance, nbytes)


def _broadcasts(sent: Mapping[int, int], fleet: Fleet, name: str, seat: EngineSeat) -> Iterator[Link]:
    for rank, holder in enumerate(seat.holders):
        for root, nbytes in sorted(sent.items()):
            distance = _distance(fleet, root, holder)
            yield Link(f"holder {root}", f"engine {name} rank {rank}", distance, nbytes)


def _distance(fleet: Fleet, source: int, target: int) -> Distance:
    if source == target:
        return "same GPU or slot"
    return "same host" if fleet.node(source) == fleet.node(target) else "other host"
