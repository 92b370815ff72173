"""Estimates the least time of direct reads: each link's bytes over the link's rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.plan.cross_host.cross_host_parts import Needs, divided
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.text import count_text, size_text, time_text

SAME_GPU, SAME_HOST, OTHER_HOST = range(3)
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bandwidths of equal hosts, in 1e9 bytes per second.

    Attributes:
        name: the cluster's name, for printing.
        hbm: bandwidth of one GPU's memory, for read and written bytes together.
        nvlink: bandwidth into one GPU from other GPUs of the host, and likewise out of the GPU.
        nic: bandwidth into a host, per GPU, and likewise out of the host. Every GPU may use all NICs of the
            host.
    """

    name: str
    hbm: float
    nvlink: float
    nic: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """One engine rank on GPU number `gpu`, and the rank's bytes from each trainer rank.

    Attributes:
        passed_on: bytes from other hosts that other GPUs of the host pass on to this rank, by GPU.
        times: how many equal ranks it stands for, on different hosts if they read from other hosts. The load
            on the ranks' own links does not add up, the load on the trainers' links does.
    """

    name: str
    gpu: int
    by_trainer: Mapping[int, int]
    num_copies: int
    passed_on: Mapping[int, int] = field(default_factory=dict)
    times: int = 1

    @classmethod
    def of_host(
        cls,
        planned: Sequence[tuple[str, int, Needs]],
        trainers: Sequence[int],
        gpus_per_host: int,
        bundles: HostBundles | None = None,
    ) -> list[Receiver]:
        """Make receivers for ranks of one host, given by name, GPU and reads.

        If several ranks need the same bytes of other hosts, these bytes cross once, see `HostBundles`.
        `bundles` are the bundles of all reads, if they are known.
        """
        host = planned[0][1] // gpus_per_host
        near = {number for number, gpu in enumerate(trainers) if gpu // gpus_per_host == host}
        if len(near) < len(trainers) and bundles is None:
            bundles = divided([reads for _, _, reads in planned]).bundles
        found = []
        for place, (name, gpu, reads) in enumerate(planned):
            packed, passed_on = bundles.arrivals(place, near) if bundles else ({}, {})
            local = {trainer: nbytes for trainer, nbytes in reads.by_trainer().items() if trainer in near}
            found.append(
                cls(
                    name=name,
                    gpu=gpu,
                    by_trainer=local | packed,
                    num_copies=len(reads),
                    passed_on={planned[giver][1]: nbytes for giver, nbytes in passed_on.items()},
                )
            )
        return found

    def links(self, trainers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the GPUs that send it bytes, and how many. `trainers` has each trainer rank's GPU."""
        for trainer, nbytes in self.by_trainer.items():
            yield trainers[trainer], nbytes
        yield from self.passed_on.items()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFloor:
    """Reads of one engine rank.

    Attributes:
        nbytes: bytes from the same GPU, from the rest of the host, and from other hosts.
        seconds: time of the rank's slowest link if no other rank reads; None without rates.
        times: how many ranks read the same.
    """

    name: str
    nbytes: tuple[int, int, int]
    num_copies: int
    seconds: float | None
    times: int = 1

    def __str__(self) -> str:
        time = "" if self.seconds is None else f"; floor {time_text(self.seconds)}"
        return f"{_distances_text(self.nbytes)}; {count_text(self.num_copies, 'copy')}{time}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectFloor:
    """Figures of the reads of several engine ranks; `str()` prints them.

    Attributes:
        ranks: the planned ranks, in the order given; each stands for `times` ranks.
        num_ranks: how many ranks there are. Other figures are of the planned ranks only.
        nbytes, num_copies: sums over all planned ranks; nbytes as in `RankFloor`.
        seconds: lower bound of any schedule of these reads; None without rates.
        bottleneck: the link that takes this long, such as ``NVLink into GPU 3``.
    """

    ranks: tuple[RankFloor, ...]
    num_ranks: int
    nbytes: tuple[int, int, int]
    num_copies: int
    cluster: str | None
    seconds: float | None
    bottleneck: str

    @property
    def num_planned(self) -> int:
        return sum(rank.times for rank in self.ranks)

    @property
    def is_sample(self) -> bool:
        return self.num_planned < self.num_ranks

    @property
    def slowest(self) -> RankFloor:
        """The rank with the largest floor; without rates, the one that reads most."""
        return max(self.ranks, key=lambda rank: (rank.seconds or 0.0, sum(rank.nbytes)))

    def __str__(self) -> str:
        which = f"{self.num_planned} of " if self.is_sample else ""
        reads = "engine rank reads" if self.num_ranks == 1 else "engine ranks read"
        lines = [
            f"{which}{self.num_ranks} {reads} {size_text(sum(self.nbytes))} "
            f"in {count_text(self.num_copies, 'copy')}",
            f"all: {_distances_text(self.nbytes)}",
            *self._rank_lines(),
        ]
        if self.seconds is not None:
            least = "at least " if self.is_sample else ""
            lines.append(f"on {self.cluster}: floor {least}{time_text(self.seconds)}; {self.bottleneck}")
        if self.is_sample:
            lines.append("the other ranks were left out, in the floor too: planning them takes long")
        return "\n".join(lines)

    def _rank_lines(self) -> Iterator[str]:
        shown = self.ranks
        if self.num_planned > _MOST_SHOWN:
            shown = (shown[0],) if self.slowest is shown[0] else (shown[0], self.slowest)
        for rank in shown:
            mark = ", the slowest" if rank is self.slowest and self.num_planned > 1 else ""
            yield f"{rank.name}{mark}: {rank}"


def distances(gpu: int, trainers: Sequence[int], gpus_per_host: int) -> list[int]:
    """Return the distance from `gpu` of each trainer rank's GPU, as `near` of `Reshard.reads`."""
    return [_distance(gpu, trainer, gpus_per_host) for trainer in trainers]


def direct_floor(
    receivers: Sequence[Receiver],
    trainers: Sequence[int],
    gpus_per_host: int,
    rates: LinkRates | None = None,
    *,
    num_ranks: int | None = None,
) -> DirectFloor:
    """Add up the simultaneous reads of `receivers`, of which there is at least one.

    Args:
        trainers: the GPU of each trainer rank.
        gpus_per_host: GPUs are numbered host by host.
        rates: without them there are no times.
        num_ranks: number of engine ranks, if `receivers` are only some of them.
    """
    parts = [_by_distance(receiver, trainers, gpus_per_host) for receiver in receivers]
    loads: defaultdict[str, float] = defaultdict(float)
    for receiver in receivers if rates else ():
        _add_seconds(loads, receiver, trainers, gpus_per_host, rates, receiver.times)
    slowest = max(loads, key=loads.__getitem__, default="")
    ranks = tuple(
        RankFloor(
            name=receiver.name,
            nbytes=nbytes,
            num_copies=receiver.num_copies,
            seconds=_own_seconds(receiver, trainers, gpus_per_host, rates),
            times=receiver.times,
        )
        for receiver, nbytes in zip(receivers, parts, strict=True)
    )
    all_parts = [[nbytes * rank.times for nbytes in rank.nbytes] for rank in ranks]
    local, near, far = (sum(column) for column in zip(*all_parts, strict=True))
    return DirectFloor(
        ranks=ranks,
        num_ranks=sum(rank.times for rank in ranks) if num_ranks is None else num_ranks,
        nbytes=(local, near, far),
        num_copies=sum(rank.num_copies * rank.times for rank in ranks),
        cluster=rates.name if rates else None,
        seconds=loads[slowest] if rates else None,
        bottleneck=slowest,
    )


def _distance(gpu: int, trainer: int, gpus_per_host: int) -> int:
    if gpu == trainer:
        return SAME_GPU
    return SAME_HOST if gpu // gpus_per_host == trainer // gpus_per_host else OTHER_HOST


def _by_distance(receiver: Receiver, trainers: Sequence[int], gpus_per_host: int) -> tuple[int, int, int]:
    found = [0, 0, 0]
    for giver, nbytes in receiver.links(trainers):
        found[_distance(receiver.gpu, giver, gpus_per_host)] += nbytes
    return found[0], found[1], found[2]


def _add_seconds(
    loads: defaultdict[str, float],
    receiver: Receiver,
    trainers: Sequence[int],
    gpus_per_host: int,
    rates: LinkRates | None,
    times: int = 1,
) -> None:
    """Add how long each link is busy with the reads of `receiver`. Bytes are read and written once.

    `times`: how many such receivers load the links of other hosts.
    """
    assert rates
    here = receiver.gpu
    for there, nbytes in receiver.links(trainers):
        memory = nbytes / rates.hbm / 1e9
        distance = _distance(here, there, gpus_per_host)
        elsewhere = times if distance == OTHER_HOST else 1
        loads[f"memory of GPU {here}"] += memory
        loads[f"memory of GPU {there}"] += memory * elsewhere
        if distance == SAME_HOST:
            seconds = nbytes / rates.nvlink / 1e9
            loads[f"NVLink into GPU {here}"] += seconds
            loads[f"NVLink out of GPU {there}"] += seconds
        if distance == OTHER_HOST:
            seconds = nbytes / (rates.nic * gpus_per_host) / 1e9
            loads[f"NICs into host {here // gpus_per_host}"] += seconds
            loads[f"NICs out of host {there // gpus_per_host}"] += seconds * elsewhere


def _own_seconds(
    receiver: Receiver, trainers: Sequence[int], gpus_per_host: int, rates: LinkRates | None
) -> float | None:
    if rates is None:
        return None
    loads: defaultdict[str, float] = defaultdict(float)
    _add_seconds(loads, receiver, trainers, gpus_per_host, rates)
    return max(loads.values(), default=0.0)


def _distances_text(nbytes: tuple[int, int, int]) -> str:
    local, near, far = map(size_text, nbytes)
    return f"own GPU {local}, own host {near}, other hosts {far}"
