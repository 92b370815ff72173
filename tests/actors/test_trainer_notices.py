"""A trainer's actor says during `publish` that its weights may be read, which is enough for an update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import ray

from tests.fleets.actors import Engine, spawn
from tests.fleets.digesting import PLAN, Trainer
from tests.fleets.gated_trainer import AnswersLate
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.ray import remote
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteTrainer, remote_trainer
from weightsync.errors import MovedError, PeerLostError
from weightsync.protocol.messages import PublishReport, PublishTask


def run(
    test: Callable[[RemoteTrainer], Awaitable[None]],
    may_end: Path,
    *,
    num_threads: int = 1,
) -> None:
    async def whole() -> None:
        actor = ray.remote(Trainer).options(max_concurrency=num_threads)
        trainer = remote_trainer("trainer 0", actor.remote(may_end))
        links = NodeLinks(None)
        try:
            links.open(trainer)
            await test(trainer)
        finally:
            await links.close()
            ray.kill(trainer.handle)

    asyncio.run(whole())


TASK = PublishTask(count=True)


async def publish(trainer: RemoteTrainer) -> tuple[asyncio.Future[None], asyncio.Task[PublishReport]]:
    readable = asyncio.get_running_loop().create_future()
    return readable, asyncio.create_task(trainer.publish(TASK, readable))


async def asked(trainer: RemoteTrainer) -> asyncio.Future[None]:
    """Ask until it has dialled, and has come back from its last call. Returns what it has resolved."""
    deadline = time.monotonic() + patient(30)
    while True:
        readable = asyncio.get_running_loop().create_future()
        if (asked := trainer.ask_readable(readable)) and await asyncio.wait_for(asked, patient(30)):
            return readable
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_the_driver_knows_before_publish_has_returned(tmp_path: Path) -> None:
    may_end = tmp_path / "may end"

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        assert trainer.node
        await trainer.node.dialled()  # a notice before that is not sent
        readable, publishing = await publish(trainer)
        await asyncio.wait_for(readable, patient(30))
        assert not publishing.done()
        may_end.touch()
        assert (await publishing).fingerprint.any()

    run(test, may_end)


def test_an_idle_trainer_publishes_without_a_call_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (may_end := tmp_path / "may end").touch()
    monkeypatch.setattr(remote, "LONG_S", patient(30))

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        readable = await asked(trainer)
        assert readable.done()
        num_ready, *_ = await trainer.handle.seen.remote()
        assert (await trainer.publish(TASK, await asked(trainer))).fingerprint.any()
        assert await trainer.handle.seen.remote() == (num_ready + 1, 1, 0)

    run(test, may_end)


def test_ray_is_called_too_for_what_takes_long_and_it_is_published_once(tmp_path: Path) -> None:
    may_end = tmp_path / "may end"

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        publishing = asyncio.create_task(trainer.publish(TASK, await asked(trainer)))
        await asyncio.wait([publishing], timeout=0.2)
        assert not publishing.done()
        may_end.touch()
        assert (await publishing).fingerprint.any()
        assert (await trainer.handle.seen.remote())[1:] == (1, 1)

    run(test, may_end)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_trainer_that_is_killed_once_it_may_be_read_is_known_to_be_gone(
    tmp_path: Path, has_begun: bool
) -> None:
    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        readable = await asked(trainer)
        publishing = asyncio.create_task(trainer.publish(TASK, readable)) if has_begun else None
        if publishing:
            await asyncio.wait([publishing], timeout=0.2)
        ray.kill(trainer.handle)
        with pytest.raises(PeerLostError, match="trainer 0"):
            await asyncio.wait_for(publishing or trainer.publish(TASK, readable), patient(30))

    run(test, tmp_path / "never")


def test_an_error_comes_as_it_is(tmp_path: Path) -> None:
    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        await trainer.handle.fail.remote(MovedError("trainer 0: w is in other memory"))
        with pytest.raises(MovedError, match="w is in other memory"):
            await trainer.publish(TASK, await asked(trainer))

    run(test, tmp_path / "never")


def test_a_report_that_no_frame_holds_comes_by_ray(tmp_path: Path) -> None:
    (may_end := tmp_path / "may end").touch()

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        await trainer.handle.count.remote(60_000)
        report = await trainer.publish(TASK, await asked(trainer))
        assert len(report.nonfinite) == 60_000
        assert (await trainer.handle.seen.remote())[1:] == (1, 1)

    run(test, may_end)


def test_a_trainer_that_is_called_leaves_it_to_publish(tmp_path: Path) -> None:
    """Ray runs `publish` after the call, which may still write weights."""
    (may_end := tmp_path / "may end").touch()
    begun, may_stop = tmp_path / "begun", tmp_path / "may stop"

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        await asked(trainer)
        working = trainer.handle.work.remote(begun, may_stop)
        while not begun.exists():
            await asyncio.sleep(0.01)
        readable = asyncio.get_running_loop().create_future()
        early = trainer.ask_readable(readable)
        assert early
        assert not await early
        publishing = asyncio.create_task(trainer.publish(TASK, readable))
        await asyncio.wait([publishing], timeout=0.2)
        assert not readable.done()
        may_stop.touch()
        assert (await publishing).fingerprint.any()
        assert readable.done()
        await working

    run(test, may_end)


def test_an_actor_that_runs_calls_on_several_threads_leaves_it_to_publish(tmp_path: Path) -> None:
    """Whether one of them still writes weights is not known."""
    (may_end := tmp_path / "may end").touch()

    async def test(trainer: RemoteTrainer) -> None:
        await trainer.attach(PLAN, 0, None)
        deadline = time.monotonic() + patient(30)
        while not (early := trainer.ask_readable(readable := asyncio.get_running_loop().create_future())):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not await early
        assert (await trainer.publish(TASK, readable)).fingerprint.any()
        assert (await trainer.handle.seen.remote())[1:] == (1, 1)

    run(test, may_end, num_threads=2)


WIDTH = 64


def test_an_update_does_not_wait_for_rays_answer(cluster: None, tmp_path: Path) -> None:
    trainer, engine = spawn(AnswersLate, WIDTH, "s0", str(tmp_path)), spawn(Engine, WIDTH, "e0", "x0")
    config = SyncConfig(bucket_bytes=8192, timeout_s=patient(10), connect_timeout_s=patient(30))
    with WeightSync(config) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        sync.update_weights(1)
        (tmp_path / "waits").touch()
        report = sync.update_weights(2)
        assert report.engines == {"e0": 2}
        assert report.verified
        assert "trainer 0" in report.spans
        assert (tmp_path / "waits").exists()
        assert (tmp_path / "s0 answers").exists(), "it has not answered yet"
        (tmp_path / "waits").unlink()
        ray.get(trainer.train.remote(3))
        assert sync.update_weights(3).engines == {"e0": 3}
    ray.kill(trainer)
    ray.kill(engine)
