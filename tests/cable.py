"""A link between two processes that a test holds back or cuts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from tests.patience import patient


class Cable:
    """Carries connections to an endpoint. Bytes that it holds back are lost if it is cut.

    Attributes:
        endpoint: where to dial in place of the other end.
        recorded: all bytes of the processes that dialled.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port, self._num_dials = host, int(port), 0
        self.recorded = bytearray()
        self._carries, self._holds = asyncio.Event(), asyncio.Event()
        self._carries.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._dialled, self._host)
        self.endpoint = f"tcp://{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self.cut()

    def has_dials(self, number: int) -> bool:
        """Return True if `number` connections have been made, or more."""
        return self._num_dials >= number

    def hold(self) -> None:
        """Hold back all bytes, as a link that is down."""
        self._carries.clear()
        self._holds.clear()

    async def holds_some(self) -> None:
        """Wait for bytes that are held back."""
        await asyncio.wait_for(self._holds.wait(), patient(10))

    def let_go(self) -> None:
        """Carry bytes again, first those that were held back."""
        self._carries.set()

    async def cut(self) -> None:
        """Hang up at both ends. New connections are carried."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._tasks.clear()
        self._writers.clear()
        self._carries.set()

    async def _dialled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_dials += 1
        self._writers.append(writer)
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers.append(back)
        for end, other, record in ((reader, back, self.recorded), (there, writer, bytearray())):
            self._tasks.append(asyncio.ensure_future(self._carry(end, other, record)))

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray
    ) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    if not self._carries.is_set():
                        self._holds.set()
                    await self._carries.wait()
                    record += data
                    writer.write(data)
        finally:
            writer.close()
