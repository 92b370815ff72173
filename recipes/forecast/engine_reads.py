"""Forecasts the reads of engine ranks from the trainers' memory, and the least time for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from weightsync.plan import Layout, Members, Reshard
from weightsync.plan.cross_host.cross_host_parts import Needs, divided
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.plan.direct.alike import AlikeReads, AlikeReshard
from weightsync.plan.figures.estimate import OTHER_HOST, DirectFloor, Receiver, direct_floor, distances
from weightsync.recipes.forecast.grids import TrainersGrid
from weightsync.recipes.forecast.hosts import HostSpec

MOST_COPIES = 12_000_000
"""Planning this many takes ten seconds; in kinds, where each stands for hundreds, up to two minutes."""
_LEAST_RANKS = 2


@dataclass(frozen=True, slots=True)
class EngineRank:
    """Rank number `rank` of engine `engine`, on GPU number `gpu`."""

    engine: str
    rank: int
    gpu: int


def reads_floor(
    source: TrainersGrid,
    engines: Mapping[str, Layout],
    members: Members,
    tensors: Collection[str],
    cluster: tuple[str, HostSpec] | None,
) -> DirectFloor:
    """Return the direct floor of all engine ranks, or of a sample if planning them takes long.

    Args:
        source: the trainers' layout.
        engines: the layout of each engine. Equal engines share a layout.
        members: the GPU of each rank.
        tensors: names of the tensors that are read.
        cluster: name and rates of the hosts. Without them, all GPUs are on one host without rates.
    """
    plans = _ReadPlans(source, engines, members, tensors, cluster)
    every = [EngineRank(name, rank, gpu) for name, gpus in members.engines for rank, gpu in enumerate(gpus)]
    times = alike(every, engines, members, plans.per_host if cluster else None)
    models = [*times]
    num_planned = plans.affordable([every[number] for number in models])
    chosen = [models[index] for index in sample(len(models), num_planned, plans.per_host)]
    receivers: list[Receiver] = []
    for _, group in groupby(chosen, lambda number: every[number].gpu // plans.per_host):
        numbers = [*group]
        made = plans.receivers([every[number] for number in numbers])
        receivers += [replace(each, times=times[n]) for each, n in zip(made, numbers, strict=True)]
    rates = cluster[1].link_rates(cluster[0]) if cluster else None
    return direct_floor(receivers, members.trainers, plans.per_host, rates, num_ranks=len(every))


class _ReadPlans:
    """Plans the reads of engine ranks like the driver: by kinds of tensors for reads from other hosts.

    Attributes:
        per_host: number of GPUs of a host.
    """

    def __init__(
        self,
        source: TrainersGrid,
        engines: Mapping[str, Layout],
        members: Members,
        tensors: Collection[str],
        cluster: tuple[str, HostSpec] | None,
    ) -> None:
        self._source, self._engines, self._members = source, engines, members
        self._tensors, self._has_hosts = frozenset(tensors), cluster is not None
        self.per_host = cluster[1].gpus_per_host if cluster else members.num_holders
        self._gpus = dict(members.engines)
        self._paired: dict[tuple[Layout, bool], Reshard | AlikeReshard] = {}
        self._trainer_hosts = {gpu // self.per_host for gpu in members.trainers}
        self._planned: dict[tuple[Layout, int], AlikeReads] = {}
        self._divided: dict[tuple[tuple[Layout, int], ...], HostBundles] = {}

    def affordable(self, ranks: Sequence[EngineRank]) -> int:
        """Return how many of `ranks` may be planned. They have about as many reads as the first."""
        first = self._reads(ranks[0])
        num_copies = len(first.reads if isinstance(first, AlikeReads) else first)
        num_plans = len({self._key(each) or each for each in ranks})
        most = max(_LEAST_RANKS, MOST_COPIES // max(num_copies, 1))
        return len(ranks) if num_plans <= most else min(len(ranks), most)

    def receivers(self, ranks: Sequence[EngineRank]) -> list[Receiver]:
        """Return the receivers for `ranks`, all of one host."""
        reads = [self._reads(each) for each in ranks]
        planned = [
            (f"{each.engine} rank {each.rank}", each.gpu, its) for each, its in zip(ranks, reads, strict=True)
        ]
        keys = tuple(key for each in ranks if (key := self._key(each)))
        bundles: HostBundles | None = None
        if self._is_far(ranks[0].gpu) and len(keys) == len(ranks):
            if keys not in self._divided:
                self._divided[keys] = divided(reads).bundles
            bundles = self._divided[keys]
        return Receiver.of_host(planned, self._members.trainers, self.per_host, bundles)

    def _reads(self, its: EngineRank) -> Needs:
        key, pairs = self._key(its), self._pair(its.engine)
        if key and key in self._planned:
            return self._planned[key]
        near = distances(its.gpu, self._members.trainers, self.per_host)
        if isinstance(pairs, Reshard):
            num_trainers = len(self._members.trainers)
            start = 0 if OTHER_HOST in near else its.gpu * num_trainers // self._members.num_holders
            return pairs.reads(its.rank, near, start=start)
        reads = pairs.reads(its.rank, near)
        if key:
            self._planned[key] = reads
        return reads

    def _key(self, its: EngineRank) -> tuple[Layout, int] | None:
        """Return a key that ranks with the same reads share. None if reads depend on the rank's host."""
        pairs = self._pair(its.engine)
        if isinstance(pairs, Reshard) or pairs.has_replicas:
            return None
        return self._engines[its.engine], its.rank

    def _pair(self, name: str) -> Reshard | AlikeReshard:
        engine = self._engines[name]
        key = engine, not self._has_hosts or any(map(self._is_far, self._gpus[name]))
        if key not in self._paired:
            found = AlikeReshard.of(self._source, name, engine, self._tensors) if key[1] else None
            self._paired[key] = found or Reshard(self._source.whole, name, engine, only=self._tensors)
        return self._paired[key]

    def _is_far(self, gpu: int) -> bool:
        """Return True if a trainer is on another host than `gpu`."""
        return bool(self._trainer_hosts - {gpu // self.per_host})


def alike(
    every: Sequence[EngineRank], engines: Mapping[str, Layout], members: Members, per_host: int | None
) -> dict[int, int]:
    """Return a rank per group that reads the same bytes, with the group's size.

    If the hosts are known, two hosts are alike if they have no trainer and the same ranks in the same
    order. Otherwise two ranks are alike if their GPUs have no trainer and they start with the same trainer.
    """
    trainers = {*members.trainers}
    hosts = {gpu // per_host for gpu in trainers} if per_host else set()

    def kind(number: int) -> tuple[int, ...]:
        its = every[number]
        turn = 0 if per_host else its.gpu * len(members.trainers) // members.num_holders
        place = its.gpu % per_host if per_host else 0
        return id(engines[its.engine]), its.rank, turn, place

    first: dict[tuple[object, ...], list[int]] = {}
    times: dict[int, int] = {}
    for group, found in groupby(range(len(every)), lambda n: every[n].gpu // per_host if per_host else n):
        numbers = [*found]
        gpus = [every[number].gpu for number in numbers]
        alone = group in hosts if per_host else gpus[0] in trainers
        key = (*gpus,) if alone else tuple(map(kind, numbers))
        for number in first.setdefault(key, numbers):
            times[number] = times.get(number, 0) + 1
    return times


def sample(num_ranks: int, num_planned: int, per_host: int) -> list[int]:
    """Choose at most `num_planned` ranks, in whole hosts, evenly spread, with the first rank.

    Whole hosts, because mostly the reads of all ranks of a host together are the limit.
    """
    if num_planned >= num_ranks:
        return list(range(num_ranks))
    block = min(per_host, num_planned)
    num_blocks, num_planned_blocks = -(-num_ranks // block), num_planned // block
    starts = [number * num_blocks // num_planned_blocks * block for number in range(num_planned_blocks)]
    return [rank for start in starts for rank in range(start, min(start + block, num_ranks))]
