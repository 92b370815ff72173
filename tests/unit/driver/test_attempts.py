"""An attempt says which holder was lost, as soon as it is, whatever else failed before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import patient
from weightsync.driver.updating.attempt import Attempt
from weightsync.errors import PeerLostError, StateError, WeightSyncError
from weightsync.protocol.messages import Moved
from weightsync.protocol.timing import Span

MOVED = Moved(Span("move", 1.0, 2.0))
OUTCOMES: Sequence[Moved | WeightSyncError] = (
    MOVED,
    StateError("its own error"),
    PeerLostError("a holder", "killed"),
)


async def loads() -> str:
    return "loaded"


@settings(deadline=None)
@given(st.permutations(range(4)), st.lists(st.sampled_from(OUTCOMES), min_size=4, max_size=4))
def test_the_first_lost_holder_is_told_at_once_and_none_if_none_is(
    order: Sequence[int], outcomes: Sequence[Moved | WeightSyncError]
) -> None:
    async def work() -> None:
        moves: list[asyncio.Future[Moved]] = [asyncio.get_running_loop().create_future() for _ in order]
        named = {f"holder {i}": move for i, move in enumerate(moves)}
        attempt = Attempt(named, {"e0": loads()}, {"e0": [*named]}, patient(10))
        running, lost = asyncio.create_task(attempt.run()), asyncio.create_task(attempt.lost_holder())
        expected: WeightSyncError | None = None
        for number in order:
            outcome = outcomes[number]
            if isinstance(outcome, WeightSyncError):
                moves[number].set_exception(outcome)
            else:
                moves[number].set_result(outcome)
            for _ in range(5):
                await asyncio.sleep(0)
            if isinstance(outcome, PeerLostError):
                expected = outcome
                break
        if expected:
            assert lost.done()
        for move in moves:
            if not move.done():
                move.set_result(MOVED)
        assert await asyncio.wait_for(lost, patient(10)) is expected
        moved, loaded = await asyncio.wait_for(running, patient(10))
        assert {*moved.answers} | {*moved.failures} == {*named}
        assert loaded.answers == {"e0": "loaded"}

    asyncio.run(work())


def test_holders_that_are_given_up_are_not_lost() -> None:
    async def work() -> None:
        move: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()
        attempt = Attempt({"holder 0": move}, {"e0": loads()}, {"e0": ["holder 0"]}, 0.01)
        lost = asyncio.create_task(attempt.lost_holder())
        moved, _ = await asyncio.wait_for(attempt.run(), patient(10))
        assert moved.failures.keys() == {"holder 0"}
        assert await asyncio.wait_for(lost, patient(10)) is None

    asyncio.run(work())


def test_an_attempt_that_is_given_up_ends_its_calls() -> None:
    async def work() -> None:
        move: asyncio.Future[Moved] = asyncio.get_running_loop().create_future()
        attempt = Attempt({"holder 0": move}, {"e0": loads()}, {"e0": ["holder 0"]}, patient(10))
        running = asyncio.create_task(attempt.run())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert move.cancelled()

    asyncio.run(work())
