"""Every error that weightsync raises on purpose.

    WeightSyncError
    ├── ConfigError           the user's input: names the field, the value and a remedy   (also ValueError)
    ├── PlanError             two layouts that do not fit: names the parameter            (also ValueError)
    ├── StateError            a call that this state does not allow                       (also RuntimeError)
    │   └── MovedError        weights that are read in place are elsewhere: an update connects again by itself
    ├── DeadlineError         a wait ended: names the phase and who did not come          (also TimeoutError)
    │   └── SlowError         an engine did not keep up with a move: names the engine
    ├── PeerLostError         a process that we need is gone
    ├── PeerError             a process that we need raised something that is not in this tree
    ├── TransportError        bytes could not be moved
    │   └── ReadError         a peer's memory could not be read: names the peer
    ├── WireError             bytes on one of our sockets that are no message of ours
    ├── EngineError           an engine refused or failed: names it, its rank and the phase
    │   └── RankLostError     a rank's own process ended or is stopped: names the rank
    ├── NonfiniteError        weights that hold NaN or Inf: names the tensors
    ├── VerifyError           what arrived is not what was sent: names the tensors
    └── SourceChangedError    what was sent changed while it was read: names the trainers and the tensors

Catch broadly, recover narrowly::

    try:
        sync.update_weights(version=8)
    except DeadlineError as error:
        print(error.phase, error.missing)
    except WeightSyncError:
        ...

All of them rebuild from ``args``, positionally: Ray pickles errors, and one that needs keyword
arguments reaches the driver as another type, its fields lost.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "KINDS",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "MovedError",
    "NonfiniteError",
    "PeerError",
    "PeerLostError",
    "PlanError",
    "RankLostError",
    "ReadError",
    "SlowError",
    "SourceChangedError",
    "StateError",
    "TransportError",
    "VerifyError",
    "WeightSyncError",
    "Where",
    "WireError",
    "nearest",
]


@dataclass(frozen=True, slots=True)
class Where:
    """Which engine failed, which of its ranks if one said so, on the way to which version, and when."""

    engine: str
    rank: int | None
    version: int
    phase: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"engine {self.engine}{rank}, version {self.version}, {self.phase}"


class WeightSyncError(Exception):
    """Base of every error raised on purpose.

    `where` is set on the failure of an engine in an update or a refill.
    """

    where: Where | None = None


class ConfigError(WeightSyncError, ValueError):
    """``field`` got ``value``, and ``remedy`` says what would do; ``at`` is the file and line, if known."""

    def __init__(self, field: str, value: object, remedy: str, at: str = "") -> None:
        super().__init__(field, value, remedy, at)
        self.field, self.value, self.remedy, self.at = field, value, remedy, at

    def __str__(self) -> str:
        at = f"{self.at}: " if self.at else ""
        return f"{at}{self.field}: {self.value!r} is not valid; {self.remedy}"


class PlanError(WeightSyncError, ValueError):
    """The layouts of the two sides do not fit at ``parameter``."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(parameter, problem)
        self.parameter, self.problem = parameter, problem

    def __str__(self) -> str:
        return f"{self.parameter}: {self.problem}"


class StateError(WeightSyncError, RuntimeError):
    """The call is not allowed now; the message says what has to come first."""


class MovedError(StateError):
    """A trainer's weights are of the same layout in other memory, which holders have not mapped yet."""


class DeadlineError(WeightSyncError, TimeoutError):
    """``missing`` did not finish ``phase`` within ``timeout_s`` seconds."""

    def __init__(self, phase: str, missing: Iterable[str], timeout_s: float) -> None:
        self.phase, self.missing, self.timeout_s = phase, tuple(missing), timeout_s
        super().__init__(phase, self.missing, timeout_s)
        self.args = (phase, self.missing, timeout_s)  # OSError, a base of TimeoutError, keeps only two

    def __str__(self) -> str:
        return f"{self.phase}: no answer within {self.timeout_s:g} s from {', '.join(self.missing)}"


class SlowError(DeadlineError):
    """``missing``, one engine, kept its holder waiting for ``timeout_s`` seconds; it may yet end."""


class PeerLostError(WeightSyncError):
    """The process behind ``peer`` ended."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} is gone: {self.cause}"


class PeerError(WeightSyncError):
    """`peer` raised an error of its own; `cause` is its type and text, since the type may be unknown here."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} failed: {self.cause}"


class TransportError(WeightSyncError):
    """Bytes could not be moved between two ranks."""


class ReadError(TransportError):
    """The memory that ``peer`` offers could not be read."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} could not be read: {self.cause}"


class WireError(WeightSyncError):
    """A message that is not ours, too long, or out of turn."""


class EngineError(WeightSyncError):
    """``engine``, or one ``rank`` of it, failed in ``phase``."""

    def __init__(self, engine: str, phase: str, cause: str, rank: int | None = None) -> None:
        super().__init__(engine, phase, cause, rank)
        self.engine, self.phase, self.cause, self.rank = engine, phase, cause, rank

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank},"
        return f"engine {self.engine}{rank} failed in {self.phase}: {self.cause}"


class RankLostError(EngineError):
    """The process of one ``rank`` of ``engine`` ended or is stopped, and the engine is of no use any more."""

    def __str__(self) -> str:
        return f"engine {self.engine}, rank {self.rank}, is lost: {self.cause}"


class VerifyError(WeightSyncError):
    """``tensors`` differ on ``engine`` from what the trainers published as ``version``."""

    def __init__(self, engine: str, version: int, tensors: Iterable[str]) -> None:
        self.engine, self.version, self.tensors = engine, version, tuple(tensors)
        super().__init__(engine, version, self.tensors)

    def __str__(self) -> str:
        return f"engine {self.engine}, version {self.version}: wrong bytes in {_shown(self.tensors)}"


class SourceChangedError(WeightSyncError):
    """``writers`` changed tensors of theirs while ``version`` was read: pairs of a name and tensors."""

    def __init__(self, version: int, writers: Iterable[tuple[str, Iterable[str]]]) -> None:
        self.version = version
        self.writers = tuple((name, tuple(tensors)) for name, tensors in writers)
        super().__init__(version, self.writers)

    def __str__(self) -> str:
        wrote = "; ".join(
            f"{name} wrote {_shown(tensors)} while it was read" for name, tensors in self.writers
        )
        remedy = "leave weights as they are until the call that moves them returns"
        return f"version {self.version}: {wrote}; {remedy}"


class NonfiniteError(WeightSyncError):
    """``tensors`` of ``version`` hold NaN or Inf: pairs of a name and the number of elements."""

    def __init__(self, version: int, tensors: Iterable[tuple[str, int]]) -> None:
        self.version, self.tensors = version, tuple((name, count) for name, count in tensors)
        super().__init__(version, self.tensors)

    def __str__(self) -> str:
        shown = _shown(tuple(f"{name} ({count})" for name, count in self.tensors))
        return f"version {self.version}: NaN or Inf in {shown}, elements counted"


def _shown(tensors: tuple[str, ...]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more


KINDS = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            WeightSyncError,
            ConfigError,
            PlanError,
            StateError,
            MovedError,
            DeadlineError,
            SlowError,
            PeerLostError,
            PeerError,
            TransportError,
            ReadError,
            WireError,
            EngineError,
            RankLostError,
            VerifyError,
            NonfiniteError,
            SourceChangedError,
        )
    }
)
"""The errors that travel in a message, by name."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy: the known word nearest to `word`, or all of them.

    Shape of the answer: ``"did you mean 'x'? valid: a, b, x"``.
    """
    words = sorted(known)
    begun = [each for each in words if word and each.startswith(word)]
    close = begun or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(words)}"
