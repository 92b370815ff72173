"""Holders may read once all trainers are readable, or have published; a failed publication is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.driver.verifying.trainers import Publication, Publishing
from weightsync.errors import StateError

DONE = cast("Publication", object())


async def _steps() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _begun(
    num_ranks: int,
) -> tuple[asyncio.Task[None], list[asyncio.Future[None]], asyncio.Future[object]]:
    """Wait for ranks to be readable, in a task. The last result ends the publication."""
    loop = asyncio.get_running_loop()
    readable: list[asyncio.Future[None]] = [loop.create_future() for _ in range(num_ranks)]
    end: asyncio.Future[object] = loop.create_future()

    async def publication() -> Publication:
        return cast("Publication", await end)

    waiting = asyncio.create_task(Publishing(publication, readable, list).readable())
    await _steps()
    return waiting, readable, end


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_it_waits_for_every_rank_in_whatever_order(order: Sequence[int]) -> None:
    async def work() -> None:
        waiting, readable, end = await _begun(len(order))
        for rank in order:
            assert not waiting.done()
            readable[rank].set_result(None)
            await _steps()
        assert waiting.done()
        await waiting
        end.set_result(DONE)
        await _steps()

    asyncio.run(work())


@given(st.integers(0, 3))
def test_ranks_that_have_published_need_not_say_that_they_are_readable(num_readable: int) -> None:
    async def work() -> None:
        waiting, readable, end = await _begun(4)
        for each in readable[:num_readable]:
            each.set_result(None)
        end.set_result(DONE)
        await waiting

    asyncio.run(work())


def test_an_error_of_the_publication_ends_the_wait() -> None:
    async def work() -> None:
        waiting, readable, end = await _begun(2)
        readable[0].set_result(None)
        await _steps()
        end.set_exception(StateError("a rank failed"))
        with pytest.raises(StateError, match="a rank failed"):
            await waiting

    asyncio.run(work())


@given(st.lists(st.sampled_from(["yes", "no", "raises", "nothing"]), min_size=1, max_size=4))
def test_all_ranks_publish_at_once_and_only_those_that_say_that_they_may_be_read_are_not_waited_for(
    says: Sequence[str],
) -> None:
    async def work() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        readable: list[asyncio.Future[None]] = [loop.create_future() for _ in says]
        end: asyncio.Future[Publication] = loop.create_future()

        async def publication() -> Publication:
            begun.set()
            return await end

        def ask() -> Sequence[asyncio.Future[bool]]:
            answers: list[asyncio.Future[bool]] = [loop.create_future() for _ in says]
            for each, said, may in zip(answers, says, readable, strict=True):
                if said == "raises":
                    each.set_exception(StateError("it was replaced"))
                    each.exception()
                elif said != "nothing":
                    each.set_result(said == "yes")
                if said == "yes":
                    may.set_result(None)
            return answers

        publishing = Publishing(publication, readable, ask)
        waiting = asyncio.create_task(publishing.readable())
        await begun.wait()
        await _steps()
        assert waiting.done() == (set(says) == {"yes"})
        end.set_result(DONE)
        await waiting
        assert await publishing.publication() is DONE
        publishing.close()

    asyncio.run(work())
