"""The states of an engine, and the steps between them.

EMPTY → PAUSED → WRITING → SERVING(v) → PAUSED(v) → WRITING → SERVING(w)
                    └→ STALE → PAUSED → WRITING → …         (load failed, digest wrong, too late)
In a deployment whose other engines do not hold the version yet: READY(v) before SERVING(v).
DEAD from anywhere. A refill is PAUSED → REFILLING → SERVING(v). ASLEEP from anywhere else, then PAUSED.
SERVING(v) → PAUSING(v) when a pause was not answered in time; then PAUSED(v), or SERVING(v) again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class EngineState(enum.Enum):
    """One engine's state. EMPTY and STALE engines hold no version and serve nothing.

    PAUSING engines were asked to pause and have not answered: they may still serve their version.
    READY engines hold a verified version, and are paused until their whole deployment holds it.
    ASLEEP engines serve nothing. They hold a version only if the weights were kept on the host.
    """

    EMPTY = "EMPTY"
    SERVING = "SERVING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    READY = "READY"
    ASLEEP = "ASLEEP"
    WRITING = "WRITING"
    REFILLING = "REFILLING"
    STALE = "STALE"
    DEAD = "DEAD"


_NEXT = {
    EngineState.EMPTY: {EngineState.PAUSED},
    EngineState.SERVING: {EngineState.PAUSED, EngineState.PAUSING},
    EngineState.PAUSING: {EngineState.PAUSED, EngineState.PAUSING, EngineState.READY, EngineState.SERVING},
    EngineState.PAUSED: {
        EngineState.PAUSED,
        EngineState.WRITING,
        EngineState.REFILLING,
        EngineState.READY,
        EngineState.SERVING,
    },
    EngineState.READY: {EngineState.PAUSED, EngineState.READY, EngineState.SERVING},
    EngineState.ASLEEP: {EngineState.PAUSED},
    EngineState.WRITING: {EngineState.WRITING, EngineState.READY, EngineState.SERVING},
    EngineState.REFILLING: {EngineState.READY, EngineState.SERVING},
    EngineState.STALE: {EngineState.PAUSED},
    EngineState.DEAD: set(),
}


@dataclass(slots=True)
class EngineRecord:
    """An engine's state and committed version (0 is none).

    Attributes:
        compared: the engine's weights were compared, and the engine has not been asleep since.
    """

    state: EngineState = EngineState.EMPTY
    version: int = 0
    compared: bool = field(default=False, compare=False)

    def enter(self, state: EngineState, version: int = 0) -> None:
        """Go to `state`. STALE, ASLEEP and DEAD can be entered from any state; other wrong steps are bugs.

        A DEAD engine stays DEAD: an update may find the death after the engine has answered. `version` counts
        for engines that serve, are ready to, or sleep.
        """
        if self.state is EngineState.DEAD:
            return
        fall = state in (EngineState.STALE, EngineState.ASLEEP, EngineState.DEAD)
        assert fall or state in _NEXT[self.state], f"{self.state} to {state}"
        if state is EngineState.ASLEEP:
            self.compared = False
        elif self.state in (EngineState.WRITING, EngineState.REFILLING):
            self.compared = state in (EngineState.SERVING, EngineState.READY)
        self.state = state
        if state in (EngineState.SERVING, EngineState.READY, EngineState.ASLEEP):
            self.version = version
        elif state not in (EngineState.PAUSED, EngineState.PAUSING):
            self.version = 0
