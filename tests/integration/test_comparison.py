"""Fingerprints decide; digests are asked for only to name what differs, and need not be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from tests.fleets.loop import CONFIG, Loop, drive
from tests.integration.test_rewritten import write
from weightsync.driver.engine_state import EngineState
from weightsync.driver.verifying.comparison import UNNAMED
from weightsync.errors import PeerLostError, SourceChangedError, StateError, VerifyError
from weightsync.protocol.messages import Digests, PublishTask


class Frozen(Loop):
    frozen = ("0.*",)


def asked(loop: Loop, answer: Callable[[str], None] = lambda _: None) -> list[str]:
    """Return a list to which every peer that is asked for digests is added. `answer` may raise."""
    names: list[str] = []
    peers = {"trainer 0": loop.fleet.trainers[0][0]}
    peers |= {f"engine {name}": member.peer for name, member in loop.fleet.engines.items()}
    for name, peer in peers.items():

        async def digests(name: str = name, ask=peer.digests) -> Digests:  # type: ignore[no-untyped-def]
            names.append(name)
            answer(name)
            return await ask()

        peer.digests = digests  # type: ignore[method-assign]
    return names


def flip(loop: Loop, engine: str) -> None:
    """Have the last piece that `engine` is written change a bit of another tensor."""

    def at(tensor: str) -> None:
        if tensor == "1.weight":
            loop.engines[engine].tensors["0.weight"].view(torch.int32)[3, 4] ^= 1

    loop.engines[engine].on_write = at


def gone(peer: str) -> Callable[[str], None]:
    def answer(name: str) -> None:
        if name == peer:
            raise PeerLostError(name, "it was killed")

    return answer


def test_nobody_is_asked_while_all_is_right() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        names = asked(loop)
        for version in (1, 2):
            loop.train()
            assert (await loop.controller.update(version)).engines == {"e0": version, "e1": version}
        assert names == []

    drive(work)


def test_only_the_engine_that_differs_and_the_trainers_are_asked() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        names = asked(loop)
        flip(loop, "e1")
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 0}
        assert "wrong bytes in 0.weight" in report.failures["e1"]
        assert names == ["engine e1", "trainer 0"]

    drive(work)


@pytest.mark.parametrize("peer", ["trainer 0", "engine e1"])
def test_an_engine_that_differs_never_serves_though_nobody_can_say_where(peer: str) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        asked(loop, gone(peer))
        flip(loop, "e1")
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 0}
        assert f"wrong bytes in {UNNAMED}" in report.failures["e1"]
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work)


def test_a_trainer_that_wrote_and_is_too_busy_to_answer_is_named_all_the_same() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        publish = loop.source.publish

        def write_late(count: bool) -> object:
            published = publish(count)
            write(loop)
            loop.source.publish = publish  # type: ignore[method-assign]
            # What is sent is what was written late.
            publish(count)
            return published

        loop.source.publish = write_late  # type: ignore[method-assign, assignment]
        asked(loop, gone("trainer 0"))
        with pytest.raises(SourceChangedError, match=f"version 2: trainer 0 wrote {UNNAMED}"):
            await loop.controller.update(2)
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.STALE}

    drive(work)


def test_a_refill_that_differs_is_refused_after_trainers_published_another_version() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        loop.train()
        readable = asyncio.get_running_loop().create_future()
        await loop.fleet.trainers[0][0].publish(PublishTask(count=True), readable)
        loop.controller.engine_group.enter(["e1"], EngineState.STALE)
        flip(loop, "e1")
        with pytest.raises(VerifyError, match=UNNAMED):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work)


def test_a_frozen_tensor_that_changed_is_refused_though_engines_do_not_say_which() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        with torch.no_grad():
            loop.model.get_parameter("0.bias").add_(1)

        def answer(name: str) -> None:
            if name.startswith("engine"):
                raise PeerLostError(name, "it was killed")

        asked(loop, answer)
        with pytest.raises(StateError, match=f"{UNNAMED}.* changed since version 1"):
            await loop.controller.update(2)

    drive(work, CONFIG, Frozen)
