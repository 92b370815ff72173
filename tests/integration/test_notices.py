"""Trainers' notices over real sockets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.patience import patient
from weightsync.actors.ray.control_channels import ControlChannel, ControlChannels, PublishNotices
from weightsync.channel.control import ControlOffer
from weightsync.channel.notices import Notices
from weightsync.protocol.messages import PublishReport
from weightsync.protocol.timing import Span


class Trainer:
    """A stand-in for a trainer's actor."""

    name = "trainer 0"
    notices: PublishNotices | None = None
    channel: ControlChannel | None = None

    def __init__(self) -> None:
        self.key: Any = object()
        self.offers: asyncio.Queue[ControlOffer] = asyncio.Queue()

    def answers(self, method: str) -> bool:
        return method == "dial"

    async def dial(self, offer: ControlOffer, asks: ControlOffer | None) -> None:
        assert asks is None
        await self.offers.put(offer)


class Proxy:
    """Passes bytes on to the driver until it is cut."""

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("tcp://").rsplit(":", 1)
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target[0], int(self._target[1]))
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def cut(self) -> None:
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        await self.cut()
        await self._server.wait_closed()


def run(test: Callable[[ControlChannels, Trainer, ControlOffer], Awaitable[None]]) -> None:
    async def whole() -> None:
        channels, trainer = ControlChannels(None), Trainer()
        try:
            channels.open_notices(trainer)
            await test(channels, trainer, await asyncio.wait_for(trainer.offers.get(), patient(10)))
        finally:
            await channels.close()

    asyncio.run(whole())


def expect(trainer: Trainer) -> tuple[int, asyncio.Future[None]]:
    readable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert trainer.notices
    return trainer.notices.expect(readable), readable


def test_a_notice_resolves_the_publish_of_its_ticket_alone() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        notices = Notices(offer)
        old, given_up = expect(trainer)
        ticket, readable = expect(trainer)
        notices.readable(old)
        notices.readable(ticket)
        await asyncio.wait_for(readable, patient(10))
        assert not given_up.done()
        notices.readable(ticket)  # repeated: nobody waits for it
        ticket, readable = expect(trainer)
        notices.readable(ticket)
        await asyncio.wait_for(readable, patient(10))
        notices.close()

    run(test)


def test_a_report_comes_whole_and_one_of_an_earlier_publish_does_not_count() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        assert trainer.notices
        notices, loop = Notices(offer), asyncio.get_running_loop()
        old = trainer.notices.expect(loop.create_future(), given_up := loop.create_future())
        ticket = trainer.notices.expect(loop.create_future(), told := loop.create_future())
        words = np.array([1, 1 << 63, (1 << 64) - 1], np.uint64)
        span = Span("publish", 1.8e9, 0.25)
        sent = PublishReport(words, words[::-1].copy(), {"a": 2}, [span], words + 1)
        notices.published(old, sent)
        notices.published(ticket, sent)
        notices.published(ticket, sent)  # repeated: nobody waits for it
        report = await asyncio.wait_for(told, patient(10))
        assert not given_up.done()
        assert (report.fingerprint == sent.fingerprint).all()
        assert (report.frozen == sent.frozen).all()
        assert (report.agreement == sent.agreement).all()
        assert (report.nonfinite, [*report.spans]) == ({"a": 2}, sent.spans)
        notices.close()

    run(test)


def test_a_report_that_no_frame_holds_is_left_to_ray() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        assert trainer.notices
        notices, loop = Notices(offer), asyncio.get_running_loop()
        readable, told = loop.create_future(), loop.create_future()
        ticket, nothing = trainer.notices.expect(readable, told), np.zeros(3, np.uint64)
        counts = {f"model.layers.{i}.weight": 1 for i in range(60_000)}
        notices.published(ticket, PublishReport(nothing, nothing, counts, []))
        notices.readable(ticket)  # the connection lasts
        await asyncio.wait_for(readable, patient(10))
        assert not told.done()
        notices.close()

    run(test)


def test_a_report_that_is_none_is_refused_and_the_next_one_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        assert trainer.notices
        notices, loop = Notices(offer), asyncio.get_running_loop()
        ticket = trainer.notices.expect(loop.create_future(), told := loop.create_future())
        notices.published(ticket, cast("PublishReport", {"fingerprint": "none"}))
        nothing = np.zeros(3, np.uint64)
        notices.published(ticket, PublishReport(nothing, nothing, {}, []))
        assert not (await asyncio.wait_for(told, patient(10))).nonfinite
        notices.close()

    run(test)
    assert "a process sent to the driver what it should not" in caplog.text


def test_a_trainer_dials_once_however_often_it_is_connected() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        again = Trainer()
        again.key = trainer.key
        channels.open_notices(again)
        assert again.notices is trainer.notices
        await asyncio.sleep(0)
        assert again.offers.empty()

    run(test)


def test_a_lost_connection_is_dialled_again_with_the_next_notice() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        proxy = Proxy(offer.endpoint)
        notices = Notices(msgspec.structs.replace(offer, endpoint=await proxy.start()))
        ticket, readable = expect(trainer)
        notices.readable(ticket)
        await asyncio.wait_for(readable, patient(10))
        await proxy.cut()
        async with asyncio.timeout(patient(10)):
            ticket, readable = expect(trainer)
            while not readable.done():  # the loss takes a moment to be seen
                notices.readable(ticket)
                await asyncio.sleep(0.05)
        notices.close()
        await proxy.close()

    run(test)


def test_nobody_to_tell_is_no_error() -> None:
    async def test(channels: ControlChannels, trainer: Trainer, offer: ControlOffer) -> None:
        notices = Notices(offer)
        await channels.close()
        for ticket in range(3):
            notices.readable(ticket)
            await asyncio.sleep(0.05)
        notices.close()

    run(test)


def test_notices_that_nobody_closed_do_not_hold_up_an_exit() -> None:
    """As those of an actor whose driver is gone, which the collector finds when the actor exits."""
    code = """
import gc
from weightsync.channel.control import ControlOffer
from weightsync.channel.notices import Notices
notices = Notices(ControlOffer("tcp://127.0.0.1:1", "0" * 64))
notices.readable(1)
notices.itself = notices
del notices
gc.collect()
"""
    subprocess.run([sys.executable, "-c", code], timeout=patient(30), check=True)
