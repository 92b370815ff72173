"""Engines that serve fill two that join another host at once: each byte crosses to that host once.

The fleet is that of tests/hosts/direct.py. No host keeps a copy in its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from tests.hosts.direct import CONFIG, HOSTS, Case, fleet, sites_of
from tests.hosts.outside import ask, say
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.report import SyncReport

CASE = Case("live sources", "a", {"e0": "b", "e1": "c", "e2": "a", "e3": "a"}, {})
NEWCOMERS = ("e2", "e3")
MBIT_PER_S = 50


async def lose(members: Fleet, controller: Controller, sites: Mapping[str, Any]) -> None:
    """Replace both engines of the trainer's host by new ones, which are connected but hold no weights yet."""
    for name in NEWCOMERS:
        await sites["a"].restart.remote(name)
        members.engines[name] = EngineMember(members.engines[name].peer, members.engines[name].holders)
        await controller.adopt(name)


async def fill(controller: Controller, sites: Mapping[str, Any]) -> Counter[str]:
    """Fill both at once. Returns the bytes that were read of each engine."""
    reports: list[SyncReport] = await asyncio.gather(*(controller.refill(name) for name in NEWCOMERS))
    assert all(report.verified for report in reports)
    for name in NEWCOMERS:
        assert await sites["a"].wrong.remote(name) == []
    names = {f"holder {i}": f"e{i - 1}" for i in range(1, 5)}
    read: Counter[str] = Counter()
    for report in reports:
        read.update({names[holder]: nbytes for holder, nbytes in report.bytes_from.items()})
    return read


async def work(sites: Mapping[str, Any]) -> None:
    """Fill them from two hosts, then from two of which one is killed."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
    members = fleet(CASE, sites)
    controller = Controller(CONFIG, members)
    await controller.connect()
    await asyncio.gather(*(site.train.remote() for site in sites.values()))
    assert (await controller.update(1)).verified
    size, _ = await sites["a"].nbytes.remote()

    await lose(members, controller, sites)
    before, begun = ask("nbytes", "head"), time.monotonic()
    read = await fill(controller, sites)
    crossed = ask("nbytes", "head") - before
    say(
        f"two that join: model {size} bytes, crossed {crossed} in {time.monotonic() - begun:.2f} s, "
        f"read of {dict(sorted(read.items()))}"
    )
    assert abs(crossed - size) < 0.05 * size
    assert read["e2"] + read["e3"] == read["e0"] + read["e1"]  # the second of them read from the first
    assert min(read["e0"], read["e1"]) > 0.4 * size

    await lose(members, controller, sites)
    before = ask("nbytes", "head")
    filling = asyncio.ensure_future(fill(controller, sites))
    while ask("nbytes", "head") - before < size / 4:
        assert not filling.done()
        await asyncio.sleep(0.01)
    with contextlib.suppress(ray.exceptions.ActorDiedError):
        await sites["b"].die.remote()
    read = await filling
    say(f"one killed: read of {dict(sorted(read.items()))}")
    assert 0 < read["e0"] < 0.4 * size
    assert read["e0"] + read["e1"] > size


def live_sources() -> None:
    """Count what crosses, and kill a source in mid-read."""
    for host in HOSTS.values():
        ask("sending_rate", host, MBIT_PER_S)
    with sites_of(CASE) as sites:
        asyncio.run(work(sites))
