"""A trainer that is no longer waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.actors.remote import remote_trainer


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
