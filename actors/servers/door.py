"""Where processes that Ray did not start find their driver."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ray.actor import ActorHandle

from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.handle import EngineHandle, Joined, JoinedServer
from weightsync.actors.servers.rank import JoinedRank, TrainerHandle
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, WeightSyncError
from weightsync.node.link import Link
from weightsync.node.messages import Join, JoinRank
from weightsync.protocol.daemon import on_daemon
from weightsync.text import count_text

logger = logging.getLogger("weightsync.actors")

TOKEN, JOIN = "WEIGHTSYNC_TOKEN", "WEIGHTSYNC_JOIN"
_LEAST_TOKEN = 16


class Door:
    """The servers and trainer ranks that may join, and those that did. Used on one event loop.

    Attributes:
        port: where processes dial in, None if none may.
        token: the secret that they show.
    """

    def __init__(
        self,
        config: SyncConfig,
        when_joined: Callable[[JoinedServer], None],
        is_silent: Callable[[object], bool],
    ) -> None:
        """
        Args:
            when_joined: is called once a server has got its place, the first time and after a restart.
            is_silent: returns True for a server that has stopped answering, maybe for ever.
        """
        self._config, self._when_joined, self._is_silent = config, when_joined, is_silent
        self._servers: dict[JoinedServer, frozenset[str]] = {}
        self._by_url: dict[str, JoinedServer] = {}
        self._ranks: Sequence[JoinedRank] = ()
        self._checking: dict[Link, asyncio.Future[None]] = {}
        self._looked_up: Future[Mapping[JoinedServer, frozenset[str]]] | None = None
        self._address = self._refused = ""
        self.port = config.join_port
        self.token = os.environ.get(TOKEN, "")

    def server(self, url: str) -> JoinedServer:
        """Return the server at `url`, the same one until `forget`. For any thread."""
        return self._by_url.setdefault(url.rstrip("/"), JoinedServer(url))

    def expect(self, name: str, server: JoinedServer, address: str) -> None:
        """Let `server` join as engine `name`. `address`: this driver's, as other hosts reach it."""
        server.expect(f"engine {name}", self._config.heartbeat_s)
        self._address = address
        if server not in self._servers:
            self._servers[server] = _addresses(server.url, address)

    def expect_ranks(self, ranks: Sequence[JoinedRank]) -> None:
        """Let `ranks` join, and no others. Hang up on others."""
        for gone in {*self._ranks}.difference(ranks):
            gone.kill()
        for rank in ranks:
            rank.expect(str(rank), self._config.heartbeat_s)
        self._ranks = ranks

    def forget(self, server: object) -> None:
        """Let `server` join no more, and hang up."""
        if isinstance(server, JoinedServer) and server in self._servers:
            del self._servers[server], self._by_url[server.url.rstrip("/")]
            server.kill()

    def link(self, join: Join | JoinRank) -> Link | str:
        """Return the link of the process that dials, or why it cannot join now."""
        found = self._server(join.url) if isinstance(join, Join) else self._rank(join)
        if isinstance(found, str):
            return found
        if found.link.is_dialled and found.link.process != join.process and not self._is_silent(found):
            if isinstance(found, JoinedRank) and found.link not in self._checking:
                self._checking[found.link] = asyncio.ensure_future(self._check(found.link))
            return f"another process is {found}"
        if found.link.process:  # by the same process, which has given up, or by an earlier one
            found.link.end(PeerLostError(found.link.name, "its process joins again"))
        found.expect(found.link.name, self._config.heartbeat_s)
        if isinstance(found, JoinedServer):
            self._when_joined(found)
        return found.link

    async def _check(self, link: Link) -> None:
        """Let a rank's process go if it does not answer: it hangs, or its host is lost."""
        ping = {link.name: link.call("ping")}
        error = (await gather_named(ping, "heartbeat", self._config.heartbeat_s)).failures.get(link.name)
        if isinstance(error, DeadlineError):
            link.end(PeerLostError(link.name, "it does not answer, and another process joins"))
        del self._checking[link]

    def _server(self, url: str) -> JoinedServer | str:
        if self._looked_up and self._looked_up.done():
            found, self._looked_up = self._looked_up.result(), None
            self._servers |= {each: urls for each, urls in found.items() if each in self._servers}
        for server, urls in self._servers.items():
            if url.rstrip("/") in urls:
                return server
        known = ", ".join(each.url for each in self._servers) or "none"
        self._refused = f"; {url} was refused"
        # A host's name may have another address now: the server asks again, see `JoinedProcess`.
        self._looked_up = self._looked_up or on_daemon(
            partial(_look_up, [*self._servers], self._address), "weightsync-names"
        )
        return f"{url} is not registered; registered: {known}"

    def _rank(self, join: JoinRank) -> JoinedRank | str:
        if len(self._ranks) != join.world_size or not 0 <= join.rank < join.world_size:
            how_many = count_text(len(self._ranks), "rank")
            return f"it is rank {join.rank} of {join.world_size}; registered: {how_many}"
        return self._ranks[join.rank]

    def explained(self, error: WeightSyncError, server: object) -> WeightSyncError:
        """Return `error`, with the address to dial if it is about a server that has not joined."""
        if not isinstance(error, DeadlineError) or not isinstance(server, JoinedServer):
            return error
        if server.link.process:
            return error
        why = f"{server.url} has not joined at {self._address}:{self.port}{self._refused}"
        return DeadlineError(error.phase, [f"{each} ({why})" for each in error.missing], error.timeout_s)

    def starter(self, placement: Placement) -> Joined | None:
        """Return the process that starts the holder of a placement; None if Ray does."""
        return next((each for each in (*self._servers, *self._ranks) if each.starts(placement)), None)


def with_servers(
    handles: Mapping[str, ActorHandle[Any] | str], config: SyncConfig, door: Door
) -> Mapping[str, EngineHandle]:
    """Return `handles` of engines with the servers at URLs, which join through `door`.

    Raises ConfigError if a URL is none, or if no server could join.
    """
    if not isinstance(handles, Mapping) or not any(isinstance(each, str) for each in handles.values()):
        return handles  # `check_engines` checks them
    _check_door(config)
    return {
        name: _server(f"engines[{name!r}]", each, door) if isinstance(each, str) else each
        for name, each in handles.items()
    }


def _server(field: str, url: str, door: Door) -> JoinedServer:
    if not _is_address(url, "http", "https"):
        raise ConfigError(field, url, "give the server's address, such as http://10.0.0.7:8000")
    return door.server(url)


def _is_address(url: str, *schemes: str) -> bool:
    """Return True if `url` is a host and a port, with one of `schemes`."""
    try:
        where = urlsplit(url)
        is_whole = bool(where.port and where.hostname and where.hostname.encode("idna"))
    except ValueError:  # a port that does not exist, or no name of a host
        return False
    return is_whole and where.scheme in schemes and not where.path.strip("/")


def with_ranks(handles: Sequence[ActorHandle[Any]] | int, config: SyncConfig) -> Sequence[TrainerHandle]:
    """Return `handles` of trainers, or so many ranks. Raises ConfigError if these cannot join."""
    if not isinstance(handles, int):
        return handles  # `check_trainers` checks them
    if isinstance(handles, bool) or handles < 1:
        raise ConfigError("trainers", handles, "give the number of ranks that call weightsync.join")
    _check_door(config)
    return [*map(JoinedRank, range(handles))]


def _check_door(config: SyncConfig) -> None:
    if config.join_port is None:
        remedy = "servers and trainers dial in there: give a free port, such as 29500"
        raise ConfigError("sync.join_port", None, remedy)
    check_token()


def check_address() -> None:
    """Raise ConfigError unless the environment says where the driver is."""
    if not _is_address(driver_endpoint(), "tcp"):
        raise ConfigError(JOIN, os.environ.get(JOIN), "set the driver's address, such as 10.0.0.1:29500")


def driver_endpoint() -> str:
    """Return the endpoint of the driver in the environment."""
    return f"tcp://{os.environ.get(JOIN, '').rpartition('//')[2]}"


def check_token() -> None:
    """Raise ConfigError unless the environment has a token."""
    if len(os.environ.get(TOKEN, "")) < _LEAST_TOKEN:
        remedy = (
            f"set one secret of at least {_LEAST_TOKEN} characters for the driver and all processes that join"
        )
        raise ConfigError(TOKEN, None, remedy)


def _addresses(url: str, own: str) -> frozenset[str]:
    """Return the ways in which a server at `url` may say where it is."""
    where = urlsplit(url)
    assert where.hostname
    try:
        found = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("url", url, f"this host does not know its address: {error}") from error
    hosts = {str(each[4][0]) for each in found}
    if any(ipaddress.ip_address(each).is_loopback for each in hosts):
        hosts.add(own)
    return frozenset({url.rstrip("/"), *(server_url(host, where.port or 0) for host in hosts)})


def _look_up(servers: Sequence[JoinedServer], own: str) -> Mapping[JoinedServer, frozenset[str]]:
    """Return `_addresses` of the servers whose hosts are known now."""
    found = dict[JoinedServer, frozenset[str]]()
    for each in servers:
        with suppress(ConfigError):
            found[each] = _addresses(each.url, own)
    return found


def server_url(host: str, port: int) -> str:
    """Return the URL of a server at an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
