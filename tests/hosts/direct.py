"""Direct updates between hosts over gloo: what each host lacks crosses its link once.

The fleet is that of tests/hosts_fleet.py. A process on each host has all of it, made alike, and does the work
of its own members.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from tests.hosts.outside import ask, say
from tests.hosts_fleet import Engine, Hosts, MappingHolder, Source
from tests.patience import patient
from weightsync import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.errors import PeerLostError
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

CONFIG = SyncConfig(
    mode="direct",
    bucket_bytes=1 << 20,
    timeout_s=patient(10),
    connect_timeout_s=patient(20),
    keep_versions=1,
)
HOSTS = {"a": "head", "b": "west", "c": "east"}
"""Hosts, by their letters in a `Case`."""
HIDDEN = 20_000
UPDATES = 3


@dataclass(frozen=True)
class Case:
    """A fleet over hosts, and how many models each host lacks.

    Attributes:
        trainers, engines: the host of each rank, as in `tests.hosts_fleet.Hosts`.
        lacks: the models that cross to each host in an update, as far as they are whole.
    """

    name: str
    trainers: str
    engines: Mapping[str, str]
    lacks: Mapping[str, int]


CASES = (
    Case("passed on", "aaa", {"e0": "bb", "e1": "bb"}, {"west": 1, "head": 0, "east": 0}),
    Case("to two hosts", "aaa", {"e0": "bb", "e1": "cc"}, {"west": 1, "head": 0, "east": 1}),
    Case("both ways", "aab", {"e0": "bb", "e1": "aa"}, {"east": 0}),
)


class Site:
    """One host's process."""

    def __init__(self, case: Case) -> None:
        address = ray.util.get_node_ip_address()
        self._fleet = Hosts(case.trainers, case.engines, CONFIG, hidden=HIDDEN, address=address)

    def call(self, kind: str, key: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call one of its members: a source, an engine or a holder."""
        return getattr(getattr(self._fleet, kind)[key], method)(*arguments)

    def train(self) -> None:
        """Write the next weights to all sources."""
        self._fleet.train()

    def restart(self, name: str) -> None:
        """Replace an engine of this host by a new one with empty memory."""
        self._fleet.respawn(name)

    def die(self) -> None:
        """End this process as a crash does."""
        os.kill(os.getpid(), signal.SIGKILL)

    def wrong(self, name: str) -> list[str]:
        """Return what an engine of this host holds and should not."""
        return self._fleet.wrong(name)

    def nbytes(self) -> tuple[int, dict[str, int]]:
        """Return the bytes of the model, and of what each engine needs, with what several ranks need."""
        return self._fleet.size, {name: sum(self._fleet.needed(name)) for name in self._fleet.engines}

    def num_messages(self, holder: int) -> int:
        """Return the rounds of messages of a holder, 0 if it takes no part."""
        exchange = self._fleet.holders[holder].cross_host
        return exchange.shuffle.num_rounds if exchange and exchange.shuffle else 0

    def close(self) -> None:
        """Close all of its members."""
        self._fleet.close()


KINDS: Mapping[str, type] = {"sources": Source, "engines": Engine, "holders": MappingHolder}


class Far:
    """A member of the fleet, in its host's process. It has the methods of its kind, and no others."""

    def __init__(self, site: Any, kind: str, key: Any) -> None:
        self._site, self._kind, self._key = site, kind, key
        for method in dir(KINDS[kind]):
            if not method.startswith("_"):
                setattr(self, method, partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> Any:
        call = self._site.call.remote(self._kind, self._key, method, arguments)
        try:
            return ray.get(call, timeout=CONFIG.connect_timeout_s + patient(10))
        except ray.exceptions.ActorDiedError as error:
            raise PeerLostError(f"{self._kind} {self._key}", "its process ended") from error


def fleet(case: Case, sites: Mapping[str, Any]) -> Fleet:
    """Return the fleet as the driver calls it."""
    hosts, members = list(case.trainers), {}
    for name, on in case.engines.items():
        holders = tuple(range(len(hosts), len(hosts) + len(on)))
        members[name] = EngineMember(LocalEngine(Far(sites[on[0]], "engines", name)), holders)
        hosts += on
    trainers = [
        (LocalTrainer(Far(sites[on], "sources", rank)), rank) for rank, on in enumerate(case.trainers)
    ]
    peers = [LocalPeer(Far(sites[on], "holders", i)) for i, on in enumerate(hosts)]
    return Fleet(trainers, members, peers, hosts)


async def count(case: Case, sites: Mapping[str, Any]) -> None:
    """Update, and compare what crosses each link with the plan."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
    members = fleet(case, sites)
    controller = Controller(CONFIG, members)
    await controller.connect()

    async def update(version: int) -> None:
        await asyncio.gather(*(site.train.remote() for site in sites.values()))
        report = await controller.update(version)
        assert report.verified
        assert report.engines == dict.fromkeys(case.engines, version)
        assert set(report.routes.values()) == {"direct"}, report.routes

    async def check() -> None:
        for name, on in case.engines.items():
            assert await sites[on[0]].wrong.remote(name) == []

    await update(1)
    await check()
    planned = dict.fromkeys(HOSTS.values(), 0)
    for link in controller.links():
        if link.distance == "other host":
            engine = link.target.split()[1]
            planned[HOSTS[case.engines[engine][0]]] += link.nbytes
    before = {host: ask("nbytes", host) for host in HOSTS.values()}
    for version in range(2, 2 + UPDATES):
        await update(version)
    crossed = {host: (ask("nbytes", host) - nbytes) / UPDATES for host, nbytes in before.items()}
    await check()
    size, needed = await next(iter(sites.values())).nbytes.remote()
    rounds = [await sites[on].num_messages.remote(i) for i, on in enumerate(members.nodes)]
    say(f"{case.name}: model {size} bytes, engines need {needed}; rounds of messages by holder {rounds}")
    for host, nbytes in planned.items():
        say(f"{case.name}: {host} planned {nbytes}, crossed {crossed[host]:.0f} an update")
        assert abs(crossed[host] - nbytes) < 0.05 * (nbytes or size), (host, nbytes, crossed)
        if host in case.lacks:
            assert nbytes == case.lacks[host] * size


@contextmanager
def sites_of(case: Case) -> Iterator[Mapping[str, Any]]:
    """Start a process on each host, by its letter."""
    sites = {
        letter: ray.remote(Site).options(num_cpus=0, resources={host: 1}, max_concurrency=32).remote(case)
        for letter, host in HOSTS.items()
    }
    try:
        yield sites
        for site in sites.values():
            with suppress(ray.exceptions.ActorDiedError):  # a case may have killed it
                ray.get(site.close.remote(), timeout=patient(10))
    finally:
        for site in sites.values():
            ray.kill(site)


def direct() -> None:
    """Count each case."""
    for case in CASES:
        with sites_of(case) as sites:
            asyncio.run(count(case, sites))
