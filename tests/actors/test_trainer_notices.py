"""A trainer's actor says during `publish` that its weights may be read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ray

from tests.actors.digesting import PLAN, Trainer
from tests.patience import patient
from weightsync.actors.control_channels import ControlChannels
from weightsync.actors.remote import RemoteTrainer, remote_trainer
from weightsync.protocol.messages import PublishReport


def run(test: Callable[[RemoteTrainer], Awaitable[None]], may_end: Path, *, asks: bool = False) -> None:
    async def whole() -> None:
        trainer = remote_trainer("trainer 0", ray.remote(Trainer).remote(may_end))
        channels = ControlChannels(None)
        try:
            channels.open_notices(trainer, asks=asks)
            await test(trainer)
        finally:
            await channels.close()
            ray.kill(trainer.handle)

    asyncio.run(whole())


async def publish(trainer: RemoteTrainer) -> tuple[asyncio.Future[None], asyncio.Task[PublishReport]]:
    readable = asyncio.get_running_loop().create_future()
    return readable, asyncio.create_task(trainer.publish(True, readable))


async def ask(trainer: RemoteTrainer, ticket: int) -> bool:
    """Ask as soon as the channel is open."""
    assert trainer.channel
    deadline = time.monotonic() + patient(30)
    while not (asked := trainer.channel.call("readable", (ticket,))):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return bool(await asyncio.wait_for(asked, patient(30)))


async def until_readable(trainer: RemoteTrainer, ticket: int) -> None:
    """Ask until the actor has come back from its last call."""
    deadline = time.monotonic() + patient(30)
    while not await ask(trainer, ticket):
        assert time.monotonic() < deadline


def test_the_driver_knows_before_publish_has_returned(tmp_path: Path) -> None:
    may_end = tmp_path / "may end"

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        readable, publishing = await publish(trainer)
        await asyncio.wait_for(readable, patient(30))
        assert not publishing.done()
        may_end.touch()
        assert (await publishing).fingerprint.any()

    run(test, may_end)


def test_an_idle_trainer_knows_before_publish_has_begun_and_does_not_look_twice(tmp_path: Path) -> None:
    (may_end := tmp_path / "may end").touch()

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        await until_readable(trainer, 1)
        readable, publishing = await publish(trainer)  # number 1
        await publishing
        assert readable.done()
        # Here, before it was asked to publish, and at most once more when it was: none in `publish` itself.
        assert await asyncio.to_thread(ray.get, trainer.handle.num_ready.remote()) in (1, 2)

    run(test, may_end, asks=True)


def test_a_trainer_that_is_called_leaves_it_to_publish(tmp_path: Path) -> None:
    """Ray runs `publish` after the call, which may still write weights."""
    (may_end := tmp_path / "may end").touch()
    begun, may_stop = tmp_path / "begun", tmp_path / "may stop"

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        await until_readable(trainer, 7)
        working = trainer.handle.work.remote(begun, may_stop)
        while not begun.exists():
            await asyncio.sleep(0.01)
        assert not await ask(trainer, 8)
        readable, publishing = await publish(trainer)
        await asyncio.wait([publishing], timeout=0.2)
        assert not readable.done()
        may_stop.touch()
        assert (await publishing).fingerprint.any()
        assert readable.done()
        await asyncio.to_thread(ray.get, working)

    run(test, may_end, asks=True)
