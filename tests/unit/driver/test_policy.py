from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.driver.healing.healing_policy import Action, decide
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    PlanError,
    RankLostError,
    ReadError,
    SourceChangedError,
    StateError,
    TransportError,
    VerifyError,
    WeightSyncError,
)

REFILL, RESPAWN, DROP, RAISE = Action

GONE = PeerLostError("engine e0", "killed")
RANK_GONE = RankLostError("e0", "watch", "killed", 1)
HUNG = DeadlineError("move", ("engine e0",), 60.0)
HUNG_AND_LATE = DeadlineError("move", ("engine e0", "holder 1"), 60.0)
BROKEN = EngineError("e0", "move", "no kernel")
WRONG = VerifyError("e0", 7, ("lm_head.weight",))
THEIR_OWN = PeerError("engine e0", "TypeError: no")
CLOSED = StateError("engine e0 is closed")
UNREADABLE = ReadError("holder 1", "connection reset")
CUT = TransportError("the socket is gone")
HOLDER_LOST = PeerLostError("holder 1", "killed")
HOLDER_LATE = DeadlineError("move", ("holder 1", "trainer 0"), 60.0)
MISFIT = PlanError("lm_head.weight", "has another shape")
BAD_INPUT = ConfigError("sync.transport", "nccl", "give auto")

ENGINE_GONE = [GONE, RANK_GONE, HUNG, HUNG_AND_LATE]
ENGINE_BROKEN = [BROKEN, WRONG, THEIR_OWN, CLOSED]
WRITTEN = SourceChangedError(7, [("trainer 0", ["lm_head.weight"])])
PEER_FAILED = [UNREADABLE, CUT, HOLDER_LOST, HOLDER_LATE, WRITTEN]
STUCK = DeadlineError("respawn", ("respawn() of engine e0",), 600.0)
HOPELESS = [MISFIT, BAD_INPUT, STUCK]
ALL = [*ENGINE_GONE, *ENGINE_BROKEN, *PEER_FAILED, *HOPELESS]

failures = st.sampled_from(ALL)
situations = st.fixed_dictionaries(
    {
        "max_attempts": st.integers(0, 6),
        "backoff_s": st.floats(0, 1e6),
        "is_dead": st.booleans(),
        "can_refill": st.booleans(),
        "can_respawn": st.booleans(),
        "num_live": st.integers(0, 8),
        "min_engines": st.integers(1, 8),
    }
)


def action(failure: WeightSyncError, attempt: int = 1, **changes: Any) -> Action:
    situation: dict[str, Any] = {
        "max_attempts": 3,
        "backoff_s": 1.0,
        "is_dead": False,
        "can_refill": True,
        "can_respawn": True,
        "num_live": 1,
        "min_engines": 1,
    }
    return decide(failure, attempt=attempt, **situation | changes).action


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [
        (ENGINE_GONE, RESPAWN, RESPAWN),
        (ENGINE_BROKEN, REFILL, RESPAWN),
        (PEER_FAILED, REFILL, REFILL),
        (HOPELESS, DROP, DROP),
    ],
)
def test_the_table_where_everything_can_be_had(
    kind: list[WeightSyncError], first: Action, later: Action
) -> None:
    for failure in kind:
        assert [action(failure, attempt) for attempt in (1, 2, 3)] == [first, later, later]


@pytest.mark.parametrize(
    ("failure", "first", "later"),
    [(GONE, DROP, DROP), (HUNG, REFILL, REFILL), (BROKEN, REFILL, REFILL), (CUT, REFILL, REFILL)],
)
def test_what_cannot_be_respawned_is_refilled_if_it_lives(
    failure: WeightSyncError, first: Action, later: Action
) -> None:
    assert [action(failure, attempt, can_respawn=False) for attempt in (1, 2)] == [first, later]


@pytest.mark.parametrize(
    ("failure", "first", "later"),
    [(GONE, RESPAWN, RESPAWN), (HUNG, RESPAWN, RESPAWN), (BROKEN, DROP, RESPAWN), (CUT, DROP, DROP)],
)
def test_what_cannot_be_refilled_waits_for_the_next_update(
    failure: WeightSyncError, first: Action, later: Action
) -> None:
    assert [action(failure, attempt, can_refill=False) for attempt in (1, 2)] == [first, later]


@pytest.mark.parametrize("failure", ALL, ids=str)
def test_a_dead_engine_is_respawned_whatever_failed_last(failure: WeightSyncError) -> None:
    wanted = DROP if failure in HOPELESS else RESPAWN
    assert [action(failure, attempt, is_dead=True) for attempt in (1, 2)] == [wanted, wanted]
    assert action(failure, is_dead=True, can_respawn=False) is DROP


@pytest.mark.parametrize("failure", ALL, ids=str)
def test_to_give_up_is_to_drop_only_where_the_others_are_enough(failure: WeightSyncError) -> None:
    assert action(failure, attempt=4, num_live=2, min_engines=2) is DROP
    assert action(failure, attempt=4, num_live=1, min_engines=2) is RAISE
    assert action(failure, max_attempts=0, num_live=0) is RAISE


@given(failure=failures, situation=situations)
def test_healing_always_ends(failure: WeightSyncError, situation: dict[str, Any]) -> None:
    attempt = 1
    while decide(failure, attempt=attempt, **situation).action in (REFILL, RESPAWN):
        attempt += 1
    assert attempt <= situation["max_attempts"] + 1


@given(failure=failures, attempt=st.integers(1, 10_000), situation=situations)
def test_nothing_is_done_that_cannot_be_done(
    failure: WeightSyncError, attempt: int, situation: dict[str, Any]
) -> None:
    decision = decide(failure, attempt=attempt, **situation)
    if decision.action is RESPAWN:
        assert situation["can_respawn"]
    if decision.action is REFILL:
        assert situation["can_refill"]
        assert not situation["is_dead"]
        assert failure is not GONE
    if decision.action is DROP:
        assert situation["num_live"] >= situation["min_engines"]
    if decision.action is RAISE:
        assert situation["num_live"] < situation["min_engines"]
    if decision.action in (DROP, RAISE) or attempt == 1:
        assert decision.delay_s == 0


@given(failure=st.sampled_from([f for f in ALL if f not in HOPELESS]), backoff_s=st.floats(0, 1e300))
def test_delays_never_shrink_and_never_pass_a_minute(failure: WeightSyncError, backoff_s: float) -> None:
    delays = [
        decide(
            failure,
            attempt=attempt,
            max_attempts=5000,
            backoff_s=backoff_s,
            is_dead=False,
            can_refill=True,
            can_respawn=True,
            num_live=1,
            min_engines=1,
        ).delay_s
        for attempt in (1, 2, 3, 4, 64, 65, 2000, 5000)
    ]
    assert delays == sorted(delays)
    assert delays[-1] <= 60
    assert delays[:3] == [0, min(60, backoff_s * 2), min(60, backoff_s * 4)]
