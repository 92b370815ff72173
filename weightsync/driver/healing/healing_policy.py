"""Decides what to do about the failure of one engine, by this table:

======================================  ================  ==================  ====================
failure                                 first attempt     later attempts      if not possible
======================================  ================  ==================  ====================
the engine's process is gone, or one    RESPAWN           RESPAWN             give up
of its ranks' (PeerLostError,
RankLostError)
the engine hung (DeadlineError)         RESPAWN           RESPAWN             REFILL, else give up
the engine broke, or holds wrong bytes  REFILL            RESPAWN             first: give up
(EngineError, VerifyError, any other),                                        later: REFILL, else give up
or it was too slow once (SlowError)
a peer failed (TransportError, of       REFILL            REFILL              give up
which ReadError is one; PeerLostError
and DeadlineError that name only
holders and trainers;
SourceChangedError)
the engine is DEAD, whatever else       RESPAWN           RESPAWN             give up
failed last
it would fail in the same way again     give up           give up
(ConfigError, PlanError), or it may
yet return (DeadlineError of respawn)
======================================  ================  ==================  ====================

A silent engine is DEAD, and may still report the end of a load. That error does not explain the death.

"Give up" is DROP if enough other engines serve, else RAISE. It also follows after the last attempt. An
engine is respawned even if it cannot be refilled: it serves from the next update on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync.errors import (
    ConfigError,
    DeadlineError,
    PeerError,
    PeerLostError,
    PlanError,
    RankLostError,
    SlowError,
    SourceChangedError,
    TransportError,
    WeightSyncError,
)

_LONGEST_S = 60.0


class Action(enum.Enum):
    """An action for a failed engine.

    REFILL fills the same process with the committed version. RESPAWN ends the process, if it still lives, and
    starts another. DROP continues without the engine: a dead engine leaves the fleet, a live engine stays
    STALE and takes part in the next update. RAISE hands the failure to the caller.
    """

    REFILL = "REFILL"
    RESPAWN = "RESPAWN"
    DROP = "DROP"
    RAISE = "RAISE"


@dataclass(frozen=True, slots=True)
class Decision:
    """Do `action` after `delay_s` seconds; DROP and RAISE never wait."""

    action: Action
    delay_s: float


_Wishes = tuple[tuple[Action, ...], tuple[Action, ...]]
"""The actions for the first attempt, and for later ones, best first."""

_GONE: _Wishes = (Action.RESPAWN,), (Action.RESPAWN,)
_HUNG: _Wishes = (Action.RESPAWN, Action.REFILL), (Action.RESPAWN, Action.REFILL)
_BROKEN: _Wishes = (Action.REFILL,), (Action.RESPAWN, Action.REFILL)
_PEER: _Wishes = (Action.REFILL,), (Action.REFILL,)
_HOPELESS: _Wishes = (), ()


def decide(
    failure: WeightSyncError,
    *,
    attempt: int,
    max_attempts: int,
    backoff_s: float,
    is_dead: bool,
    can_refill: bool,
    can_respawn: bool,
    num_live: int,
    min_engines: int,
) -> Decision:
    """Decide what to do about an engine that failed with `failure`.

    Args:
        failure: why the engine holds no version.
        attempt: number of the next attempt for this engine, from 1.
        max_attempts: how many attempts are allowed; 0 heals nothing.
        backoff_s: attempt n waits for ``backoff_s * 2 ** (n - 1)`` seconds, at most 60; the first does not
            wait.
        is_dead: the engine is DEAD, so the process cannot be filled.
        can_refill: a snapshot of the committed version, or an engine that serves it, can fill the engine.
        can_respawn: the engine's process can be started again.
        num_live: number of engines that are neither DEAD nor STALE.
        min_engines: how many of these are enough.
    """
    assert attempt >= 1
    possible = {Action.REFILL: can_refill and not is_dead, Action.RESPAWN: can_respawn}
    wishes = _wishes(failure, is_dead)[attempt > 1] if attempt <= max_attempts else ()
    for action in wishes:
        if possible[action]:
            # 2 ** 63 times any useful pause exceeds the limit; higher powers would overflow a float.
            delay_s = 0.0 if attempt == 1 else min(_LONGEST_S, backoff_s * 2 ** min(attempt - 1, 63))
            return Decision(action, delay_s)
    return Decision(Action.DROP if num_live >= min_engines else Action.RAISE, 0.0)


def _wishes(failure: WeightSyncError, is_dead: bool) -> _Wishes:
    if isinstance(failure, (ConfigError, PlanError)):
        return _HOPELESS
    if isinstance(failure, DeadlineError) and failure.phase == "respawn":
        return _HOPELESS  # a second engine would need resources that the first start still holds
    if is_dead:
        return _GONE
    if isinstance(failure, PeerLostError):
        return _PEER if _is_peer(failure.peer) else _GONE
    if isinstance(failure, RankLostError):
        return _GONE
    if isinstance(failure, SlowError):
        return _BROKEN
    if isinstance(failure, DeadlineError):
        return _PEER if all(map(_is_peer, failure.missing)) else _HUNG
    if isinstance(failure, (TransportError, SourceChangedError)) or (
        isinstance(failure, PeerError) and _is_peer(failure.peer)
    ):
        return _PEER
    return _BROKEN


def _is_peer(name: str) -> bool:
    return name.startswith(("holder ", "trainer "))
