"""A fleet of plain processes, as their driver sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.fleets.process import SHAPES, ProcessEngine, ProcessTrainer
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.node.link import Link, Links
from weightsync.protocol.peers import HolderPeer

ROOT = Path(__file__).parents[2]
PROTOCOLS = {"trainer": ProcessTrainer, "holder": HolderPeer, "engine": ProcessEngine}


class Processes:
    """Two trainers, two engines, and a holder for each of the four: all processes of their own.

    Trainer `i` has holder `i`, and engine ``e0`` has holder 2.
    """

    def __init__(self, config: SyncConfig) -> None:
        self.links = Links("127.0.0.1")
        self.cables: dict[str, Cable] = {}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.trainers: list[Any] = [self.start("trainer", i) for i in range(len(SHAPES))]
        self.holders: list[Any] = [self.start("holder", i) for i in range(4)]
        self.engines: dict[str, Any] = {f"e{i}": self.start("engine", i) for i in range(2)}
        members = {name: EngineMember(link, (2 + i,)) for i, (name, link) in enumerate(self.engines.items())}
        self.fleet = Fleet([(link, i) for i, link in enumerate(self.trainers)], members, self.holders)
        self.controller = Controller(config, self.fleet)

    def start(self, kind: str, number: int) -> Any:
        """Start a process, and return the link to it."""
        name = f"engine e{number}" if kind == "engine" else f"{kind} {number}"
        link = Link(name, PROTOCOLS[kind], again_s=1.0)
        offer = self.links.offer(link)
        self.cables[f"{kind} {number}"] = cable = Cable(offer.endpoint)
        command = [
            sys.executable,
            "-m",
            "tests.fleets.process",
            kind,
            str(number),
            cable.endpoint,
            offer.secret,
        ]
        self.children[f"{kind} {number}"] = subprocess.Popen(command, cwd=ROOT)
        return link

    def cut(self, name: str) -> None:
        """Cut the connection of a process, which can dial again."""
        self.cables[name].cut()

    def kill(self, name: str) -> None:
        """Kill a process, such as ``holder 0``, by signal 9."""
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait()

    async def update(self, version: int) -> None:
        """Train, update, and compare the engines' tensors with the trainers'."""
        trained: dict[str, str] = {}
        for rank, trainer in enumerate(self.trainers):
            trained |= await trainer.train(100 * version + rank)
        async with self.controller.exclusive():
            if not self.controller.connected:
                await self.controller.connect()
            report = await self.controller.update(version)
        serving = {name: served for name, served in report.engines.items() if served == version}
        assert report.verified
        assert serving
        for name in serving:
            assert await self.holds(name) == trained
            assert await self.engines[name].serving() == version
        self.trained = trained

    async def holds(self, name: str) -> dict[str, str]:
        """Return digests of an engine's tensors."""
        found: dict[str, str] = await self.engines[name].tensors()
        return found

    async def close(self) -> None:
        await self.controller.snapshot_index.stop()
        await self.links.close()
        for child in self.children.values():
            try:
                await asyncio.to_thread(child.wait, 10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for cable in self.cables.values():
            cable.close()


class Cable:
    """Carries connections to an endpoint, and can cut them."""

    def __init__(self, endpoint: str) -> None:
        self._to = urlsplit(endpoint)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._writers: list[asyncio.StreamWriter] = []
        self._serving = asyncio.ensure_future(self._serve())

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        self._serving.cancel()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._dialled, sock=self._listening) as server:
            await server.serve_forever()

    async def _dialled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._to.hostname, self._to.port)
        self._writers += [writer, back]
        await asyncio.gather(_carry(reader, back), _carry(there, writer))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()
