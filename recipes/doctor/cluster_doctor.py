"""`weightsync doctor --cluster`: asks an actor on each host, then measures each pair of hosts."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from weightsync.actors.ray.daemon import await_daemon
from weightsync.actors.ray.placement import choose_transport, threaded
from weightsync.actors.ray.remote import answer
from weightsync.config import Ports
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import ConfigError, DeadlineError, PeerError
from weightsync.protocol.handles import Offer
from weightsync.protocol.routes import host_of
from weightsync.recipes.doctor.cluster_report import ClusterReport, HostFacts, Pair, rounds
from weightsync.recipes.doctor.host_probe import HostProbe, wall
from weightsync.recipes.doctor.link_probe import SECRET_NBYTES

_NUM_THREADS = 4
_NUM_CLOCKS = 8
_REMEDY = (
    "give auto on a host of a running cluster, or host:port of its head (RAY_AUTH_MODE=token for a token)"
)
_ALL_GPUS = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
"""Lets an actor without a reserved GPU see all GPUs of the host."""


def examine(address: str, ports: Ports | None, timeout_s: float) -> ClusterReport:
    """Examine the Ray cluster at `address`, ``auto`` or ``host:port``.

    Each wait takes `timeout_s` seconds at most; a measurement of a pair has two more. A host that does not
    answer in time is in `ClusterReport.failures`, and the others are examined without it.

    Raises ConfigError if there is no cluster at `address`.
    """
    with _joined(address, timeout_s):
        return asyncio.run(_Examination(ports, timeout_s).run())


@contextmanager
def _joined(address: str, timeout_s: float) -> Iterator[None]:
    head = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if head.count(":") and head != "auto":
        _dial(head, timeout_s)  # a Ray that finds no head ends the process

    def join() -> None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    try:
        asyncio.run(await_daemon(join, f"the Ray cluster at {address}", "join", max(timeout_s, 10.0)))
    except (ConnectionError, ValueError, RuntimeError, DeadlineError, RayError) as error:
        raise ConfigError("--address", address, f"{_REMEDY}: {str(error).partition(chr(10))[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _dial(head: str, timeout_s: float) -> None:
    port = head.rpartition(":")[2]
    if not port.isdecimal():
        raise ConfigError("--address", head, _REMEDY)
    try:
        socket.create_connection((host_of(head), int(port)), timeout_s).close()
    except OSError as error:
        raise ConfigError("--address", head, f"{_REMEDY}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _Peer:
    """An actor, and the name of the host in messages."""

    name: str
    handle: ActorHandle[HostProbe]

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        return answer(self.name, getattr(self.handle, method).remote(*args))


class _Examination:
    """Peers that still answer, by Ray's node id, and the failures of the other peers."""

    def __init__(self, ports: Ports | None, timeout_s: float) -> None:
        self._ports, self._timeout_s = ports, timeout_s
        self._secret = secrets.token_bytes(SECRET_NBYTES)
        self._peers: dict[str, _Peer] = {}
        self._names: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    async def run(self) -> ClusterReport:
        nodes = [each for each in ray.nodes() if each["Alive"]]
        nodes.sort(key=lambda each: (each["NodeManagerAddress"], each["NodeID"]))
        self._names = dict(zip([each["NodeID"] for each in nodes], _names(nodes), strict=True))
        self._peers = {each["NodeID"]: _place(each, self._names[each["NodeID"]]) for each in nodes}
        try:
            await self._ask("start", lambda peer: peer.call("ready"))
            hosts: dict[str, HostFacts] = await self._ask(
                "facts", lambda peer: peer.call("facts", self._ports)
            )
            clocks = await self._ask("clock", _clock)
            served = "serve", self._ports, self._secret, 2 * self._timeout_s
            offers: dict[str, Offer] = await self._ask("listen", lambda peer: peer.call(*served))
            pairs = await self._measure(hosts, offers)
        finally:
            for peer in self._peers.values():
                ray.kill(peer.handle)
        shown = [
            replace(host, label=self._names[node], **clocks.get(node, {})) for node, host in hosts.items()
        ]
        return ClusterReport(shown, pairs, self._failures, self._ports)

    async def _ask(self, phase: str, call: Callable[[_Peer], Awaitable[Any]]) -> dict[str, Any]:
        """Call all peers, and give up peers that fail."""
        calls = {node: call(peer) for node, peer in self._peers.items()}
        return await self._gather(phase, calls, self._timeout_s)

    async def _gather(
        self, phase: str, calls: Mapping[str, Awaitable[Any]], timeout_s: float
    ) -> dict[str, Any]:
        outcome = await gather_named(calls, phase, timeout_s)
        for node, error in outcome.failures.items():
            peer = self._peers.pop(node)
            if isinstance(error, DeadlineError):
                error = DeadlineError(phase, (peer.name,), timeout_s)
            elif peer.name not in str(error):
                error = PeerError(peer.name, f"{phase}: {error}")
            self._failures[peer.name] = str(error)
            ray.kill(peer.handle)
        return outcome.answers

    async def _measure(self, hosts: Mapping[str, HostFacts], offers: Mapping[str, Offer]) -> list[Pair]:
        found: dict[tuple[str, str], Pair] = {}
        for each in rounds([*offers]):
            calls = {a: self._reach(a, b, hosts, offers) for a, b in each if a in self._peers}
            pairs = await self._gather("measure", calls, self._timeout_s + GRACE_S)
            found |= {(a, b): pairs[a] for a, b in each if a in pairs}
        order = [*offers]
        return [found[key] for key in sorted(found, key=lambda key: (*map(order.index, key),))]

    async def _reach(
        self, a: str, b: str, hosts: Mapping[str, HostFacts], offers: Mapping[str, Offer]
    ) -> Pair:
        """Measure from host `a` to `b`, and say how weights would go."""
        one, other, peer = hosts[a], hosts[b], self._peers[a]
        pair = Pair(self._names[a], self._names[b], offers[b].endpoint, broadcast=_broadcast(one, other))
        measured: Pair = await peer.call("reach", pair, offers[b], self._secret, self._timeout_s)
        mapped = not measured.problem and await peer.call("maps", offers[b])
        return replace(measured, refill="mapped" if mapped else one.refill)


def _place(node: Mapping[str, Any], name: str) -> _Peer:
    sees = {"runtime_env": _ALL_GPUS} if node["Resources"].get("GPU") else {}
    options = threaded(node["NodeID"], _NUM_THREADS) | sees
    return _Peer(name, ray.remote(HostProbe).options(**options).remote())


def _names(nodes: list[dict[str, Any]]) -> list[str]:
    """Return names with addresses, and with node ids if some are alike."""
    names = [f"{each['NodeManagerHostname']} ({each['NodeManagerAddress']})" for each in nodes]
    if len({*names}) == len(names):
        return names
    return [f"{name} node {each['NodeID'][:8]}" for name, each in zip(names, nodes, strict=True)]


async def _clock(peer: _Peer) -> dict[str, float]:
    """Compare the host's clock with this one's, by the quickest of some round trips."""
    best: tuple[float, float] | None = None
    for _ in range(_NUM_CLOCKS):
        before = wall()
        theirs = await peer.call("wall")
        after = wall()
        half = (after - before) / 2
        if best is None or half < best[1]:
            best = theirs - (before + half), half
    assert best
    return {"offset_ms": best[0] * 1e3, "uncertainty_ms": best[1] * 1e3}


def _broadcast(one: HostFacts, other: HostFacts) -> str:
    transport = choose_transport("auto", [*one.devices, *other.devices])
    if transport != "nccl":
        return transport
    return "nccl, RDMA" if one.rdma and other.rdma else "nccl, sockets"
