"""A trainer's actor says during `publish` that its weights may be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from tests.actors.digesting import PLAN, Trainer
from tests.patience import patient
from weightsync.actors.control_channels import ControlChannels
from weightsync.actors.remote import remote_trainer


def test_the_driver_knows_before_publish_has_returned(tmp_path: Path) -> None:
    async def work() -> None:
        may_end = tmp_path / "may end"
        trainer = remote_trainer("trainer 0", ray.remote(Trainer).remote(may_end))
        channels = ControlChannels(None)
        try:
            channels.open_notices(trainer)
            await trainer.attach(PLAN, 0, None)
            readable = asyncio.get_running_loop().create_future()
            publishing = asyncio.ensure_future(trainer.publish(True, readable))
            await asyncio.wait_for(readable, patient(30))
            assert not publishing.done()
            may_end.touch()
            assert (await publishing).fingerprint.any()
        finally:
            await channels.close()
            ray.kill(trainer.handle)

    asyncio.run(work())
