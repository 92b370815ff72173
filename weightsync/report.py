"""What one update did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["SyncReport"]


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
        num_buckets: messages that one receiver took.
        epoch: the membership's count; it grows whenever an engine joins or leaves.
        connect_phases: seconds of each phase of connecting that membership, once: ``warm_up`` is
            what this and every later update of the epoch did not have to pay.
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

    @property
    def gb_per_s(self) -> float:
        """The model's bytes over the seconds of the ``move`` phase, in 1e9 bytes; 0 if nothing moved."""
        seconds = self.phases.get("move", 0.0)
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Every field and ``gb_per_s``, in types that JSON knows."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return plain | {"gb_per_s": self.gb_per_s}

    def __str__(self) -> str:
        serving = sum(version == self.version for version in self.engines.values())
        proof = "verified" if self.verified else "not verified"
        failed = "".join(f"; {engine} failed: {error}" for engine, error in sorted(self.failures.items()))
        return (
            f"version {self.version}: {_size(self.nbytes)} to {serving} of {len(self.engines)} engines"
            f" in {self.seconds:.3g} s ({self.gb_per_s:.3g} GB/s), {proof}{failed}"
        )


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
