"""Traffic of an update: how many bytes each engine rank gets over which link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weightsync.driver.connecting.connect import Connection
from weightsync.driver.connecting.ways import Direct
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.plan.figures.estimate import LinkRates
from weightsync.protocol.timing import seconds_of
from weightsync.report import Distance, Link, SyncReport
from weightsync.text import size_text, time_text


def links(connection: Connection, fleet: Fleet) -> list[Link]:
    """List the links of an update of all engines.

    Tensors that direct engines take by broadcast are left out.
    """
    sent = connection.plan.explain().sent
    found: list[Link] = []
    for name, member in fleet.engines.items():
        if isinstance(way := connection.router.ways.get(name), Direct):
            found += _reads(connection, fleet, name, member, way)
        else:
            found += _broadcasts(sent, fleet, name, member)
    return found


def _reads(
    connection: Connection, fleet: Fleet, name: str, member: EngineMember, way: Direct
) -> Iterator[Link]:
    exchange = connection.router.exchange
    for rank, (holder, by_trainer) in enumerate(zip(member.holders, way.read, strict=True)):
        read = {(f"trainer {t}", fleet.trainers[t][1]): nbytes for t, nbytes in by_trainer.items()}
        sent = exchange.arrivals(holder) if exchange else {}
        for (source, at), nbytes in sorted([*read.items(), *sent.items()]):
            yield Link(source, f"engine {name} rank {rank}", _distance(fleet, at, holder), nbytes)


def _broadcasts(sent: Mapping[int, int], fleet: Fleet, name: str, member: EngineMember) -> Iterator[Link]:
    for rank, holder in enumerate(member.holders):
        for root, nbytes in sorted(sent.items()):
            distance = _distance(fleet, root, holder)
            yield Link(f"holder {root}", f"engine {name} rank {rank}", distance, nbytes)


def _distance(fleet: Fleet, source: int, target: int) -> Distance:
    if source == target:
        return "same GPU or slot"
    return "same host" if fleet.node(source) == fleet.node(target) else "other host"


@dataclass(frozen=True, slots=True)
class RankEfficiency:
    """Efficiency of one engine rank in one update; `str()` gives a line.

    Attributes:
        floor_s: the least seconds that the slowest link allows for the rank's bytes.
        took_s: the seconds of the rank's ``load``, until all bytes are in place; 0 if the rank took no part.
    """

    rank: str
    nbytes: int
    floor_s: float
    took_s: float

    @property
    def efficiency(self) -> float:
        """`floor_s` divided by `took_s`: 1.0 is as fast as the links."""
        return self.floor_s / self.took_s if self.took_s else 0.0

    def __str__(self) -> str:
        took = (
            f"took {time_text(self.took_s)}, {self.efficiency:.0%} of what is possible"
            if self.took_s
            else "took no part"
        )
        return f"{self.rank}: {size_text(self.nbytes)}, floor {time_text(self.floor_s)}, {took}"


def efficiency(
    links: Sequence[Link], report: SyncReport, rates: LinkRates, *, gpus_per_host: int = 8
) -> list[RankEfficiency]:
    """Compare each engine rank's time in an update with the time that the links allow.

    A floor assumes that no other rank uses the links and NICs of the rank. Ranks that share a link may be
    slower.

    Args:
        links: as `WeightSync.links` returns them.
        report: the update's report.
        rates: bandwidth of the links.
        gpus_per_host: number of GPUs, and of NICs, per host.

    Returns:
        One entry per engine rank: bytes, floor and time in seconds, and their ratio.
    """
    least_s = floors(links, rates, gpus_per_host=gpus_per_host)
    taken: Counter[str] = Counter()
    for link in links:
        taken[link.target] += link.nbytes
    found = []
    for rank, nbytes in taken.items():
        took = seconds_of(report.spans.get(rank, ()), "load")
        found.append(RankEfficiency(rank, nbytes, least_s[rank], took))
    return found


def floors(links: Sequence[Link], rates: LinkRates, *, gpus_per_host: int = 8) -> dict[str, float]:
    """Return the floor of each engine rank, in seconds. Takes the arguments of `efficiency`."""
    taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for link in links:
        taken[link.target][link.distance] += link.nbytes
    found = {}
    for rank, by_distance in taken.items():
        nanoseconds = [
            (by_distance.total() + by_distance["same GPU or slot"]) / rates.hbm,  # local bytes are read, too
            by_distance["same host"] / rates.nvlink,
            by_distance["other host"] / (rates.nic * gpus_per_host),
        ]
        found[rank] = max(nanoseconds) / 1e9
    return found
