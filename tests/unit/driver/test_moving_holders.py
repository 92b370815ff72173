"""Holders move, called directly or by relays: each ends as itself, and no relay's failure is a holder's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import patient
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, Outcome, gather_named
from weightsync.driver.updating.moves import Moves
from weightsync.errors import PeerError, PeerLostError, WeightSyncError
from weightsync.protocol.messages import Forward, Moved, Receive
from weightsync.protocol.peers import HolderPeer
from weightsync.protocol.timing import Span

NUM_HOLDERS = 6
TASKS = {index: Forward() if index % 2 else Receive() for index in range(NUM_HOLDERS)}
Said = Mapping[int, Moved | WeightSyncError | None]


class Holder:
    """Moves at once, and notes who asks it."""

    def __init__(self, index: int, fails: bool) -> None:
        self._index, self._fails = index, fails
        self.asked = list[str]()

    def say(self, by: str, *args: object) -> Moved | WeightSyncError:
        assert args == (7, TASKS[self._index], 2.5)
        self.asked.append(by)
        if self._fails:
            return PeerError(f"holder {self._index}", "no memory")
        return Moved(Span("move", float(self._index), 1.0))

    async def move(self, *args: object) -> Moved:
        said = self.say("driver", *args)
        if isinstance(said, WeightSyncError):
            raise said
        return said


class Relay:
    """Says what it knows of one holder at a time. `ends_after` so many messages it is lost, or silent."""

    def __init__(
        self, holders: Mapping[int, Holder], ends_after: int, uncalled: int, is_silent: bool = False
    ) -> None:
        self.name, self.num_renewed = "holders through a holder", 0
        self.holders: Sequence[int] = tuple(holders)
        self._peers, self._ends_after, self._uncalled = holders, ends_after, uncalled
        self._left, self._said, self._is_silent = list[int](), dict[int, Moved | WeightSyncError](), is_silent

    async def move(self, attempt: int, tasks: Mapping[int, object], timeout_s: float) -> Said:
        for index in tasks:
            if index != self._uncalled:
                self._said[index] = self._peers[index].say("relay", attempt, TASKS[index], timeout_s)
        self._left = [*tasks]
        return await self.moved()

    async def moved(self) -> Said:
        if not self._ends_after:
            if self._is_silent:
                await asyncio.Event().wait()
            raise PeerLostError(self.name, "killed")
        self._ends_after -= 1
        index = self._left.pop(0)
        return {index: self._said.get(index)}

    def renew(self) -> None:
        self.num_renewed += 1


async def outcome_of(moves: Moves, timeout_s: float) -> Outcome[Moved]:
    outcome = await gather_named(moves.calls, "move", timeout_s)
    moves.close()
    return outcome


def fleet_of(holders: Sequence[Holder], relays: Sequence[Relay]) -> Fleet:
    return Fleet([], {}, [cast("HolderPeer", each) for each in holders], move_relays=[*relays])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=NUM_HOLDERS, max_size=NUM_HOLDERS),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.none() | st.integers(0, NUM_HOLDERS - 1),
    st.integers(-1, NUM_HOLDERS - 1),
)
def test_each_holder_ends_as_itself_whoever_calls_it(
    by: Sequence[int], ends_after: tuple[int, int], failing: int | None, uncalled: int
) -> None:
    holders = [Holder(index, index == failing) for index in range(NUM_HOLDERS)]
    groups = [{i: holders[i] for i in range(NUM_HOLDERS) if by[i] == number} for number in range(2)]
    relays = [Relay(its, end, uncalled) for its, end in zip(groups, ends_after, strict=True) if len(its) > 1]

    async def work() -> None:
        moves = Moves(fleet_of(holders, relays), 7, TASKS, 2.5)
        outcome = await outcome_of(moves, patient(10))
        assert {name: each.span.began for name, each in outcome.answers.items()} == {
            f"holder {i}": float(i) for i in range(NUM_HOLDERS) if i != failing
        }
        assert [str(error) for error in outcome.failures.values()] == (
            [] if failing is None else [f"holder {failing} failed: no memory"]
        )

    asyncio.run(work())
    for relay in relays:
        order = [*relay.holders]
        ended = ends_after[groups.index({index: holders[index] for index in order})]
        assert relay.num_renewed == (ended < len(order))
        for position, index in enumerate(order):
            heard = ["relay"] if index != uncalled else []
            if index == uncalled or position >= ended:
                heard.append("driver")
            assert holders[index].asked == heard
    relayed = {index for relay in relays for index in relay.holders}
    assert all(holders[index].asked == ["driver"] for index in range(NUM_HOLDERS) if index not in relayed)


def test_a_silent_relay_leaves_time_to_hear_its_holders() -> None:
    """They are not silent themselves: `Attempt` waits as long for holders once all engines have loaded."""
    holders = [Holder(index, False) for index in range(NUM_HOLDERS)]
    relay = Relay(dict(enumerate(holders)), 2, -1, is_silent=True)

    async def work() -> None:
        outcome = await outcome_of(Moves(fleet_of(holders, [relay]), 7, TASKS, 2.5), GRACE_S)
        assert not outcome.failures

    asyncio.run(work())
    assert [each.asked for each in holders] == [["relay"]] * 2 + [["relay", "driver"]] * 4


def test_an_attempt_that_is_over_leaves_no_calls() -> None:
    holders = [Holder(index, False) for index in range(NUM_HOLDERS)]
    relay = Relay(dict(enumerate(holders)), 0, -1, is_silent=True)

    async def work() -> None:
        moves = Moves(fleet_of(holders, [relay]), 7, TASKS, 2.5)
        await asyncio.sleep(0.01)
        for call in moves.calls.values():
            cast("asyncio.Future[Moved]", call).cancel()
        moves.close()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())
    assert not relay.num_renewed
