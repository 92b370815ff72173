"""What one update did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from weightsync.protocol.timing import Span

__all__ = ["Distance", "HealReport", "Link", "SyncReport", "bytes_text"]

Distance = Literal["same GPU or slot", "same host", "other host"]


@dataclass(frozen=True, slots=True)
class Link:
    """`nbytes` of an update: from a trainer, or a holder that broadcasts or passes on, to an engine rank."""

    source: str
    target: str
    distance: Distance
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What ``update_weights`` returns: one committed version, and how it got there.

    ``print(report)`` gives one line, :meth:`to_dict` what goes into a run's ``report.json``.

    Attributes:
        version: the version that was committed.
        nbytes: payload bytes of the model, counted once however many engines took them.
        seconds: wall clock of the whole update.
        phases: seconds of each phase: ``publish``, ``pause``, ``move``, ``verify``, ``commit``. Where
            trainers are read in place, engines pause during ``publish``.
        verified: every engine that serves `version` was found to hold what the trainers published.
        engines: the version that each engine serves now.
        states: the state of each engine now.
        failures: engine → the error that kept it from `version`.
        digest: the model's digest, in hexadecimal.
        num_buckets: messages that were broadcast, to one receiver.
        epoch: the membership's count; it grows whenever an engine joins or leaves.
        connect_phases: seconds of each phase of connecting that membership, once: ``warm_up`` is
            what this and every later update of the epoch did not have to pay; ``join`` is part of ``attach``.
        routes: per engine ``direct``, where each GPU gets just its part, or why it takes broadcasts.
        bytes_from: in a refill, the bytes that were read from each holder.
        ways: in a refill, how each holder was read: ``direct``, ``rdma``, ``tcp`` or ``zeromq``.
        spans: what took how long where: the phases of ``driver``, ``publish`` of ``trainer 0``, ``move`` of
            ``holder 0``, ``load`` and ``verify`` of ``engine e0 rank 0``. Who failed has none.
        checkpoint: which one the version is, where no trainers published it.
        nonfinite: elements that are NaN or Inf, of tensors that have any; see ``SyncConfig.nonfinite``.
        peak_memory: where engines slept before, of each phase and GPU the most bytes that were in use on all
            of it, by whomever. The holder there looks every 5 ms, so that a shorter peak may be missed.
            Empty where nobody slept, and on hosts without GPUs.
    """

    version: int
    nbytes: int
    seconds: float
    phases: Mapping[str, float]
    verified: bool
    engines: Mapping[str, int]
    states: Mapping[str, str]
    failures: Mapping[str, str]
    digest: str
    num_buckets: int
    epoch: int
    connect_phases: Mapping[str, float]
    routes: Mapping[str, str] = field(default_factory=dict)
    bytes_from: Mapping[str, int] = field(default_factory=dict)
    ways: Mapping[str, str] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    checkpoint: str = ""
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    peak_memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """The model's bytes over the seconds of the ``move`` phase, in 1e9 bytes; 0 if nothing moved."""
        seconds = self.phases.get("move", 0.0)
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Every field and ``gb_per_s``, in types that JSON knows."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        spans = {who: [asdict(span) for span in spans] for who, spans in self.spans.items()}
        return plain | {"spans": spans, "gb_per_s": self.gb_per_s}

    def __str__(self) -> str:
        serving = sum(version == self.version for version in self.engines.values())
        proof = "verified" if self.verified else "not verified"
        failed = "".join(f"; {engine} failed: {error}" for engine, error in sorted(self.failures.items()))
        named = f"version {self.version}" + (f" ({self.checkpoint})" if self.checkpoint else "")
        engines = "1 engine" if len(self.engines) == 1 else f"{len(self.engines)} engines"
        return (
            f"{named}: {bytes_text(self.nbytes)} to {serving} of {engines}"
            f" in {self.seconds:.3g} s ({self.gb_per_s:.3g} GB/s), {proof}{failed}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HealReport:
    """How one engine that failed came back.

    Times are seconds since 1970: `died_at` by the wall clock, the others as many seconds later as a clock
    counted that is never set.

    Attributes:
        cause: what it failed of.
        version: what it serves now; 0 if it is ready and the next update has to bring it a version.
        died_at: when the failure was found.
        respawned_at: when its new process was ready, if it needed one.
        serving_at: when it served again, if it does.
        bytes_from: bytes that were read from each holder; none if an update came first.
        ways: how each holder was read: ``direct``, ``rdma``, ``tcp`` or ``zeromq``.
        gb_per_s: the model's bytes over the seconds of reading and loading, in 1e9 bytes.
        verified: its digests are those of the committed version.
    """

    engine: str
    cause: str
    version: int
    died_at: float
    respawned_at: float | None
    serving_at: float | None
    bytes_from: Mapping[str, int]
    ways: Mapping[str, str]
    gb_per_s: float
    verified: bool

    def to_dict(self) -> dict[str, object]:
        """Every field, in types that JSON knows."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def __str__(self) -> str:
        new = "" if self.respawned_at is None else f", new process {self.respawned_at - self.died_at:.1f} s"
        if self.serving_at is None:
            return f"engine {self.engine} is ready for the next version{new}; it had failed: {self.cause}"
        read = ", ".join(
            f"{bytes_text(nbytes)} from {holder} ({self.ways.get(holder, '')})"
            for holder, nbytes in self.bytes_from.items()
        )
        how = f"{read}, {self.gb_per_s:.3g} GB/s, verified" if read else "an update"
        return (
            f"engine {self.engine} serves version {self.version} again after"
            f" {self.serving_at - self.died_at:.1f} s{new}; {how}; it had failed: {self.cause}"
        )


def bytes_text(nbytes: int) -> str:
    """``1.25 MB``: three digits, in units of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
