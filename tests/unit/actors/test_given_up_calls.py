"""Actors that are no longer waited for."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.actors.ray.remote import remote_holder, remote_trainer
from weightsync.errors import PeerLostError


def test_rays_answer_is_given_up_with_its_caller() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        handle = SimpleNamespace(sync_publish=SimpleNamespace(remote=lambda *_: answer))
        trainer = remote_trainer("trainer 0", cast("Any", handle))
        publishing = asyncio.ensure_future(trainer.publish(False, loop.create_future()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not publishing.done()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await asyncio.sleep(0)
        assert answer.cancelled()

    asyncio.run(work())


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_holder_that_ends_before_it_starts_is_not_logged(
    is_asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        starting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        holder = remote_holder("holder 0", cast("Any", SimpleNamespace()), starting)
        if is_asked:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(holder.ready(), 0.01)
        starting.set_exception(PeerLostError("holder 0", "it was killed"))
        await asyncio.sleep(0)

    asyncio.run(work())
    gc.collect()
    assert not caplog.records
