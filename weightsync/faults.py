"""Injects faults: a plan names processes, actions and places; the named process acts.

    plan = FaultPlan.from_yaml(Path("recipes/chaos.yaml"))
    sync.inject(plan)                       # each process: set_faults(process, plan.for_(process), plan.seed)

An update calls :func:`inject` at every place where a fault may happen. Without faults, a call only reads a
variable of this module.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightsync.config import Natural, Positive, Seconds, check_fields, load_dataclass
from weightsync.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

_ANSWER_S = 0.05
"""Delay of a fault at ``idle``, so that `set_faults` is answered first."""

LINK_DOWN = "WEIGHTSYNC_LINK_DOWN"
"""The variable with a test harness's command, which cuts a link.

``COMMAND LINK SECONDS`` returns once the link is cut, and mends the link SECONDS later.
"""

_CUT_S = 10.0
"""Seconds for the command to cut the link."""

_PROCESS = re.compile(r"(engine) .+|(holder|trainer) \d+")
_PLACES = {
    "engine": ("idle", "connect", "pause", "move", "verify", "commit", "refill"),
    "holder": ("idle", "connect", "reserve", "stage", "move", "commit", "refill"),
    "trainer": ("idle", "publish"),
}
_RANK_PLACES = ("idle", "move", "verify", "refill")
"""Places in a rank's process. Except for ``idle``, the engine's process does not have these places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        process: ``engine main-0``, ``holder 1`` or ``trainer 0``.
        action: ``kill`` ends the process as ``kill -9`` does, ``hang`` stops it with all its threads
            until it gets SIGCONT, ``error`` raises a RuntimeError, ``corrupt`` flips one bit of the
            current data, ``drop`` keeps a message from being sent, ``slow`` waits for `seconds`,
            ``link_down`` has a test harness cut a link for `seconds`, see `LINK_DOWN`.
        at: the place of the fault. ``idle`` is at once, outside an update. ``refill`` is on either side.
            ``connect`` is also in an engine that joins later, ``stage`` is only in staged updates.
            ``reserve`` is in a holder that allocates memory for copies, after a connect.
        bucket: at ``move`` and ``refill``, the bucket of the fault; by default the first bucket.
        version: the version of the fault; by default any version.
        rank: the rank whose process has the fault, if an engine's ranks have separate processes. By default
            ``move``, ``verify`` and ``refill`` happen in rank 0, ``idle`` in the process that drives the
            ranks.
        seconds: how long ``slow`` waits, or the link is down.
        link: the link that ``link_down`` cuts, as the harness names it. By default the process's hostname.
        times: how often the fault happens. A process that replaces this process has no faults.
    """

    process: str
    action: Literal["kill", "hang", "error", "corrupt", "drop", "slow", "link_down"]
    at: Literal[
        "idle", "connect", "reserve", "publish", "stage", "pause", "move", "verify", "commit", "refill"
    ]
    bucket: int | Literal["first", "middle", "last"] | None = None
    version: Positive | None = None
    rank: Natural | None = None
    seconds: Seconds = 1.0
    link: str | None = None
    times: Positive = 1

    def hits(self, bucket: int, num_buckets: int) -> bool:
        """Return True if the fault happens in `bucket` of `num_buckets`."""
        if self.bucket is None:
            return True
        named = {"first": 0, "middle": num_buckets // 2, "last": num_buckets - 1}
        wanted = named[self.bucket] if isinstance(self.bucket, str) else self.bucket
        return bucket == wanted and 0 <= bucket < num_buckets


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults, and the seed of their random choices.

    Raises:
        ConfigError: names the field, such as ``chaos.faults[0].action``.
    """

    faults: tuple[Fault, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, field="chaos")
        for index, fault in enumerate(self.faults):
            _check(fault, f"chaos.faults[{index}]")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> FaultPlan:
        """Make a plan from a mapping, such as a YAML file's.

        Raises:
            ConfigError: see :func:`weightsync.config.load_dataclass`.
        """
        return load_dataclass(cls, data, field="chaos")

    @classmethod
    def from_yaml(cls, path: Path) -> FaultPlan:
        """Read a plan from a YAML file. Raises ConfigError, also if the file cannot be read."""
        import yaml

        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            remedy = f"give a YAML file; {' '.join(str(error).split())}"
            raise ConfigError("chaos", str(path), remedy) from error
        return cls.from_dict(data)

    def for_(self, process: str) -> tuple[Fault, ...]:
        """Return the faults of one process."""
        return tuple(fault for fault in self.faults if fault.process == process)

    def check_processes(self, known: Collection[str]) -> None:
        """Raise ConfigError for a fault of a process not in `known`, or without a needed harness."""
        for index, fault in enumerate(self.faults):
            if fault.process not in known:
                raise ConfigError(
                    f"chaos.faults[{index}].process", fault.process, nearest(fault.process, known)
                )
            _check_harness(fault, f"chaos.faults[{index}]")


def set_faults(process: str, faults: Sequence[Fault], seed: int) -> None:
    """Add `faults` to this process, named `process`. An empty list removes all faults.

    Raises ConfigError for a ``link_down`` if this process has no harness, see `LINK_DOWN`.
    """
    global active
    for fault in faults:
        _check_harness(fault, process)
    if not faults:
        if active is not None:
            active.clear()
        active = None
        return
    if active is None:
        active = _Faults(process, seed)
    active.add(faults)


def split_by_rank(
    faults: Sequence[Fault], num_ranks: int, apart: bool = False
) -> tuple[tuple[Fault, ...], tuple[tuple[Fault, ...], ...]]:
    """Split `faults` between an engine's process and the engine's ranks.

    A single rank runs in the engine's process unless `apart`; several ranks have separate processes.
    Raises ConfigError for a fault of a rank that does not exist.
    """
    for fault in faults:
        if fault.rank is not None and fault.rank >= num_ranks:
            raise ConfigError("fault.rank", fault.rank, f"{fault.process} has ranks 0 to {num_ranks - 1}")
    if num_ranks == 1 and not apart:
        return tuple(faults), ((),)
    there = [fault for fault in faults if fault.rank is not None or fault.at in _RANK_PLACES[1:]]
    here = tuple(fault for fault in faults if fault not in there)
    return here, tuple(
        tuple(fault for fault in there if (fault.rank or 0) == rank) for rank in range(num_ranks)
    )


def inject(
    at: str, *, bucket: int = -1, num_buckets: int = 0, version: int = 0, data: torch.Tensor | None = None
) -> bool:
    """Inject the faults that are set for this place.

    Args:
        at: as in :class:`Fault`.
        bucket: the current bucket, at ``move`` and ``refill``.
        num_buckets: number of buckets.
        version: the version that is being made; 0 if it is not known.
        data: contiguous memory to corrupt, of any dtype, on any device. It is changed in place, so nothing
            else may read it.

    Returns:
        Whether to drop the message that is about to be sent.

    Raises:
        RuntimeError: the fault is an ``error``.
    """
    faults = active
    return faults is not None and faults.inject(at, bucket, num_buckets, version, data)


class _Faults:
    """The faults of this process, with the number of times that are left."""

    def __init__(self, process: str, seed: int) -> None:
        self._process = process
        self._left: list[list[Fault]] = []
        self._random = random.Random(f"{seed} {process}")
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []

    def add(self, faults: Sequence[Fault]) -> None:
        with self._lock:
            self._left += [[fault] * fault.times for fault in faults]
        if any(fault.at == "idle" for fault in faults):
            timer = threading.Timer(_ANSWER_S, self.inject, ("idle", -1, 0, 0, None))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def clear(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def inject(self, at: str, bucket: int, num_buckets: int, version: int, data: torch.Tensor | None) -> bool:
        with self._lock:
            due = [
                left.pop()
                for left in self._left
                if left
                and left[0].at == at
                and left[0].version in (None, version)
                and left[0].hits(bucket, num_buckets)
                and (left[0].action != "corrupt" or (data is not None and data.numel() > 0))
            ]
            spots = [self._random.random() for _ in due]
        # Outside the lock, so that a slow fault does not block other threads.
        for fault, spot in zip(due, spots, strict=True):
            self._suffer(fault, spot, data)
        return any(fault.action == "drop" for fault in due)

    def _suffer(self, fault: Fault, spot: float, data: torch.Tensor | None) -> None:
        if fault.action == "kill":
            signal.raise_signal(signal.SIGKILL)
        elif fault.action == "hang":
            # Raised in this thread, so that the process stops before the call returns.
            signal.raise_signal(signal.SIGSTOP)
        elif fault.action == "error":
            raise RuntimeError(f"injected into {self._process} at {fault.at}")
        elif fault.action == "slow":
            time.sleep(fault.seconds)
        elif fault.action == "link_down":
            _cut(fault.link or socket.gethostname(), fault.seconds)
        elif fault.action == "corrupt":
            assert data is not None
            _flip(data, spot)


active: _Faults | None = None
"""This process's faults. Without any, callers need not prepare arguments of `inject`."""


def _flip(data: torch.Tensor, spot: float) -> None:
    """Flip the bit of `data` at the fraction `spot` (0 to 1)."""
    import torch

    flat = data.view(-1).view(torch.uint8)
    byte, bit = divmod(int(spot * flat.numel() * 8), 8)
    flat[byte] ^= 1 << bit


def _cut(link: str, seconds: float) -> None:
    """Have the harness cut `link`. Raises RuntimeError if it does not."""
    command = [*shlex.split(os.environ[LINK_DOWN]), link, str(seconds)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_CUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        raise RuntimeError(f"the harness did not cut link {link}: {error} {said}".rstrip()) from error


def _check_harness(fault: Fault, field: str) -> None:
    if fault.action == "link_down" and not os.environ.get(LINK_DOWN, "").strip():
        remedy = f"no harness cuts links here: set {LINK_DOWN}, in every process, to a command that does"
        raise ConfigError(f"{field}.action", fault.action, remedy)


def _check(fault: Fault, field: str) -> None:
    check_fields(fault, field=field)
    match = _PROCESS.fullmatch(fault.process)
    if match is None:
        raise ConfigError(f"{field}.process", fault.process, "give 'engine NAME', 'holder 0' or 'trainer 0'")
    places = _PLACES[match[1] or match[2]]
    if fault.at not in places:
        raise ConfigError(
            f"{field}.at", fault.at, f"{fault.process} is not there; {nearest(fault.at, places)}"
        )
    if fault.at == "idle":
        if fault.action not in ("kill", "hang", "link_down"):
            raise ConfigError(f"{field}.action", fault.action, "at idle, give kill, hang or link_down")
        if fault.version is not None:
            raise ConfigError(f"{field}.version", fault.version, "idle is at once: leave it out")
    if fault.bucket is not None and fault.at not in ("move", "refill"):
        raise ConfigError(f"{field}.bucket", fault.bucket, f"there are none at {fault.at}: leave it out")
    if fault.rank is not None:
        if match[1] is None:
            raise ConfigError(f"{field}.rank", fault.rank, f"{fault.process} has none: leave it out")
        if fault.at not in _RANK_PLACES:
            raise ConfigError(f"{field}.rank", fault.rank, f"no rank is at {fault.at}: leave it out")
    if fault.link is not None and (fault.action != "link_down" or not fault.link):
        remedy = "name a link" if fault.action == "link_down" else f"{fault.action} cuts none: leave it out"
        raise ConfigError(f"{field}.link", fault.link, remedy)
    if isinstance(fault.bucket, int) and fault.bucket < 0:
        raise ConfigError(f"{field}.bucket", fault.bucket, "give at least 0")
