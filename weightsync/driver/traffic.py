"""Which bytes of an update go from where to where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weightsync.driver.connect import Connection
from weightsync.driver.fleet import EngineSeat, Fleet
from weightsync.driver.routing import DIRECT
from weightsync.report import Distance, Link

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
    router = connection.router
    for rank, (holder, by_trainer) in enumerate(zip(seat.holders, router.read[name], strict=True)):
        read = {(f"trainer {t}", fleet.trainers[t][1]): nbytes for t, nbytes in by_trainer.items()}
        sent = router.crossing.arrivals(holder) if router.crossing else {}
        for (source, at), nbytes in sorted([*read.items(), *sent.items()]):
            yield Link(source, f"engine {name} rank {rank}", _distance(fleet, at, holder), nbytes)


def _broadcasts(sent: Mapping[int, int], fleet: Fleet, name: str, seat: EngineSeat) -> Iterator[Link]:
    for rank, holder in enumerate(seat.holders):
        for root, nbytes in sorted(sent.items()):
            distance = _distance(fleet, root, holder)
            yield Link(f"holder {root}", f"engine {name} rank {rank}", distance, nbytes)


def _distance(fleet: Fleet, source: int, target: int) -> Distance:
    if source == target:
        return "same GPU or slot"
    return "same host" if fleet.node(source) == fleet.node(target) else "other host"
