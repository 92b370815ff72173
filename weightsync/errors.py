"""Every error that weightsync raises on purpose.

    WeightSyncError
    ├── ConfigError           invalid input: names the field, the value and a remedy      (also ValueError)
    ├── PlanError             two layouts that do not fit: names the parameter            (also ValueError)
    ├── StateError            a call that this state does not allow                       (also RuntimeError)
    │   └── MovedError        a trainer's weights have new addresses: an update connects again by itself
    ├── DeadlineError         a wait ended: names the phase and the missing processes     (also TimeoutError)
    │   └── SlowError         an engine did not keep up with a move: names the engine
    ├── PeerLostError         a needed process has ended: names the process
    ├── PeerError             a needed process raised an error that is not in this tree
    ├── TransportError        bytes could not be moved
    │   ├── ReadError         a peer's memory could not be read: names the peer
    │   └── StoreError        an object of a store is missing or damaged: names the object and the version
    ├── WireError             bytes on a socket of ours that are not a message of ours
    ├── EngineError           an engine refused or failed: names the engine, the rank and the phase
    │   └── RankLostError     the process of a rank ended or is stopped: names the rank
    ├── NonfiniteError        NaN or Inf in weights: names the tensors
    ├── VerifyError           an engine received other bytes than were sent: names the tensors
    ├── SourceChangedError    weights changed while they were read: names trainers and tensors, or files
    └── ReplicasDifferError   trainers have different bytes of the same part of a tensor: names both

Catch broadly, recover narrowly::

    try:
        sync.update_weights(version=8)
    except DeadlineError as error:
        print(error.phase, error.missing)
    except WeightSyncError:
        ...

All errors can be rebuilt from ``args``, positionally. Ray pickles errors. An error that needs keyword
arguments would reach the driver as another type, without fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_LONGEST = 400
"""Characters of a value or a name that a message shows in full."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where an engine failed. Rank and version are None and 0 if they are unknown."""

    engine: str
    rank: int | None
    version: int
    phase: str

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        version = f", version {self.version}" if self.version else ""
        return f"engine {self.engine}{rank}{version}, {self.phase}"


class WeightSyncError(Exception):
    """Base of every error that weightsync raises on purpose.

    Attributes:
        where: engine, rank, version and phase, if an engine failed in an update or a refill; else None.
    """

    where: Where | None = None

    def told(self) -> str:
        """Return the message, followed by `where` if known."""
        return f"{self} ({self.where})" if self.where else str(self)


class ConfigError(WeightSyncError, ValueError):
    """A setting or an argument is not valid. Also a ValueError.

    Attributes:
        field: name of the setting or argument, such as ``sync.timeout_s``.
        value: the invalid value.
        remedy: the value to give instead.
        at: file and line of the recipe, if there is a recipe.
    """

    def __init__(self, field: str, value: object, remedy: str, at: str = "") -> None:
        super().__init__(field, value, remedy, at)
        self.field, self.value, self.remedy, self.at = field, value, remedy, at

    def __str__(self) -> str:
        at = f"{self.at}: " if self.at else ""
        return f"{at}{self.field}: {shortened(repr(self.value))} is not valid; {self.remedy}"


class PlanError(WeightSyncError, ValueError):
    """The tensors of trainers and engines do not fit together. Also a ValueError.

    Attributes:
        parameter: the tensor, or the engine, that does not fit.
        problem: the problem, and often a remedy.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(parameter, problem)
        self.parameter, self.problem = parameter, problem

    def __str__(self) -> str:
        return f"{shortened(self.parameter)}: {self.problem}"


class StateError(WeightSyncError, RuntimeError):
    """The call is not allowed in this state. Also a RuntimeError.

    The message names the call that must come first.
    """


class MovedError(StateError):
    """A trainer's weights moved to memory that holders have not mapped, or an engine's experts moved.

    The fleet has to connect again.
    """


class DeadlineError(WeightSyncError, TimeoutError):
    """A wait reached its deadline. Also a TimeoutError.

    Attributes:
        phase: the phase that waited.
        missing: the processes that did not answer, such as ``engine e0``.
        timeout_s: the seconds until the deadline.
    """

    def __init__(self, phase: str, missing: Iterable[str], timeout_s: float) -> None:
        self.phase, self.missing, self.timeout_s = phase, tuple(missing), timeout_s
        super().__init__(phase, self.missing, timeout_s)
        self.args = (phase, self.missing, timeout_s)  # OSError, a base of TimeoutError, keeps only two

    def __str__(self) -> str:
        return f"{self.phase}: no answer within {self.timeout_s:g} s from {', '.join(self.missing)}"


class SlowError(DeadlineError):
    """A holder waited too long for an engine, which may still finish. `missing` has the engine's name."""


class PeerLostError(WeightSyncError):
    """A needed process has ended.

    Attributes:
        peer: the process, such as ``trainer 0`` or ``holder 2``.
        cause: the message of Ray or the system.
    """

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} is gone: {self.cause}"


class RestartedError(PeerLostError):
    """Ray has started an actor's process again, as with ``max_restarts``. The new one is not connected."""

    def __init__(self, peer: str = "", cause: str = "Ray started its actor again: call connect()") -> None:
        super().__init__(peer, cause)


class PeerError(WeightSyncError):
    """A process raised an error that is not a WeightSyncError.

    Attributes:
        peer: the process, such as ``trainer 0``.
        cause: type and text of the error. The type may not be importable here.
    """

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} failed: {self.cause}"


class TransportError(WeightSyncError):
    """Bytes could not be moved between two ranks."""


class ReadError(TransportError):
    """A snapshot in another process could not be read.

    Attributes:
        peer: the holder that offers the snapshot.
        cause: the problem.
    """

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} could not be read: {self.cause}"


class StoreError(TransportError):
    """A store, or an object of a store, cannot be used.

    Attributes:
        store: the URL.
        name: the object, such as ``objects/<sha256>``.
        problem: the problem, with the expected and the found sha256 of a damaged object.
        version: the version that needs the object, 0 if it is not known.
    """

    def __init__(self, store: str, name: str, problem: str, version: int = 0) -> None:
        super().__init__(store, name, problem, version)
        self.store, self.name, self.problem, self.version = store, name, problem, version

    def __str__(self) -> str:
        version = f" of version {self.version}" if self.version else ""
        return f"{self.store}: {self.name}{version}: {self.problem}"


class WireError(WeightSyncError):
    """A message on a socket is unknown, too long, or out of order."""


class EngineError(WeightSyncError):
    """An engine, or a rank of an engine, refused or failed.

    Attributes:
        engine: name of the engine.
        phase: the phase that failed.
        cause: the engine's message.
        rank: the rank that failed; None if the rank is not known.
    """

    def __init__(self, engine: str, phase: str, cause: str, rank: int | None = None) -> None:
        super().__init__(engine, phase, cause, rank)
        self.engine, self.phase, self.cause, self.rank = engine, phase, cause, rank

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank},"
        return f"engine {self.engine}{rank} failed in {self.phase}: {self.cause}"


class RankLostError(EngineError):
    """The process of an engine's rank ended or is stopped. The engine cannot be used any more."""

    def __str__(self) -> str:
        return f"engine {self.engine}, rank {self.rank}, is lost: {self.cause}"


class VerifyError(WeightSyncError):
    """An engine holds other bytes than the trainers published.

    Attributes:
        engine: name of the engine.
        version: the version that the engine should hold.
        tensors: names of the tensors that differ, or ``an unknown tensor`` if the processes that know the
            digests do not answer. If equal quantised engines hold different bytes, ``live parameters of
            rank 0`` with the reason, since packed parameters belong to no tensor.
    """

    def __init__(self, engine: str, version: int, tensors: Iterable[str]) -> None:
        self.engine, self.version, self.tensors = engine, version, tuple(tensors)
        super().__init__(engine, version, self.tensors)

    def __str__(self) -> str:
        return f"engine {self.engine}, version {self.version}: wrong bytes in {_shown(self.tensors)}"


class SourceChangedError(WeightSyncError):
    """Trainers changed weights while an update read them, or files of a checkpoint changed.

    Attributes:
        version: the version that was being read; 0 if files were read for no update yet.
        writers: pairs of a trainer's name and the names of the tensors that this trainer changed.
        files: files of the checkpoint that changed after the headers were read.
    """

    def __init__(
        self, version: int, writers: Iterable[tuple[str, Iterable[str]]], files: Iterable[str] = ()
    ) -> None:
        self.version, self.files = version, tuple(files)
        self.writers = tuple((name, tuple(tensors)) for name, tensors in writers)
        super().__init__(version, self.writers, self.files)

    def __str__(self) -> str:
        told = [f"{name} wrote {_shown(tensors)} while it was read" for name, tensors in self.writers]
        remedy = "leave weights as they are until the call that moves them returns"
        if self.files:
            told.append(f"{_shown(self.files)} changed since the checkpoint was first read")
            remedy = "once its files stay as they are, publish it again, or unregister and register it again"
        at = f"version {self.version}: " if self.version else ""
        return f"{at}{'; '.join(told)}; {remedy}"


class ReplicasDifferError(WeightSyncError):
    """Trainer ranks hold different bytes of the same part of a tensor.

    Attributes:
        version: the version that was being published.
        differing: pairs of a trainer's name and the names of the tensors in which this trainer differs from
            the majority of the ranks that hold the same part. Without a majority, as between two ranks, all
            of these ranks are named. Empty if the processes that know the digests do not answer.
    """

    def __init__(self, version: int, differing: Iterable[tuple[str, Iterable[str]]]) -> None:
        self.version = version
        self.differing = tuple((name, tuple(tensors)) for name, tensors in differing)
        super().__init__(version, self.differing)

    def __str__(self) -> str:
        trainers: dict[tuple[str, ...], list[str]] = {}
        for name, tensors in self.differing:
            trainers.setdefault(tensors, []).append(name)
        which = "; ".join(f"{_shown(tuple(names))} in {_shown(each)}" for each, names in trainers.items())
        return (
            f"version {self.version}: trainers that hold the same part of a tensor hold different bytes: "
            f"{which or 'which ones is not known'}; give all of them the same weights, by one checkpoint "
            "or a broadcast from one rank"
        )


class NonfiniteError(WeightSyncError):
    """Published weights hold NaN or Inf, and ``SyncConfig.nonfinite`` is ``refuse``.

    Attributes:
        version: the version that was published.
        tensors: pairs of a tensor's name and the number of NaN or Inf elements.
    """

    def __init__(self, version: int, tensors: Iterable[tuple[str, int]]) -> None:
        self.version, self.tensors = version, tuple((name, count) for name, count in tensors)
        super().__init__(version, self.tensors)

    def __str__(self) -> str:
        shown = _shown(tuple(f"{name} ({count})" for name, count in self.tensors))
        return f"version {self.version}: NaN or Inf in {shown}, elements counted"


def _shown(tensors: tuple[str, ...]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more


KINDS: Mapping[str, type[WeightSyncError]] = MappingProxyType(
    {
        name: kind
        for name, kind in globals().items()
        if isinstance(kind, type) and issubclass(kind, WeightSyncError)
    }
)
"""Errors that messages can carry, by name."""


def shortened(text: str) -> str:
    """Return `text`, or the beginning and the length of a long `text`."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}… ({len(text)} characters)"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown word: the nearest known word and all others.

    Form: ``"did you mean 'x'? valid: a, b, x"``.
    """
    words = sorted(known)
    begun = [each for each in words if word and each.startswith(word)]
    close = begun or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(words)}"
