"""A fleet that things are done to: spare engines wait, and what was ever published is remembered."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from tests.fleets.actors import Counting, Engine, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.channel.feed import HolderFeed
from weightsync.driver.engine_state import EngineState
from weightsync.engines.rank import rank_process
from weightsync.errors import StateError, WeightSyncError
from weightsync.faults import Fault, FaultPlan
from weightsync.holder import connecting
from weightsync.holder.holder import Holder
from weightsync.report import SyncReport

WIDTH = 64
TIMEOUT_S = patient(1)
LIMIT_S = 4 * TIMEOUT_S
"""What an update may take: one phase's deadline, the grace of who waits for it, and a busy host's delays."""
SETTINGS: dict[str, Any] = {
    "bucket_bytes": 4096,
    "timeout_s": TIMEOUT_S,
    "connect_timeout_s": patient(60),
    "heartbeat_s": patient(0.5),
    "heal_backoff_s": 0.05,
}
_NUMBERS = count()


class Faulty:
    """Two trainers; engine e0 sits with trainer 0, e1 alone: holders 0 and 2 serve them."""

    def __init__(self, **settings: object) -> None:
        self._number = next(_NUMBERS)
        self._slots = {"e0": f"faulty-{self._number}-0", "e1": f"faulty-{self._number}-x"}
        self.log = Heard()
        self.version, self.committed = 0, {0}
        self.published: dict[int, Mapping[str, torch.Tensor]] = {}
        self.trainers = [self.start_trainer(rank) for rank in range(2)]
        engines = {name: self.start_engine(name) for name in self._slots}
        self.sync = WeightSync(SyncConfig(**SETTINGS | settings))
        self.sync.register_trainers(self.trainers)
        self.sync.register_engines(engines, respawn=self._respawn)
        self.sync.connect()
        assert self.sync.plan.num_buckets >= 5
        self._standbys = {name: self.start_engine(name) for name in self._slots}

    def close(self) -> None:
        self.log.close()
        self.sync.close()
        for actor in (*self.trainers, *self.sync.engines().values(), *self._standbys.values()):
            ray.kill(actor)

    def update(self) -> SyncReport | WeightSyncError:
        """The next version, or why it was not had, which is known after LIMIT_S at the latest."""
        self.version += 1
        ray.get([trainer.train.remote(self.version) for trainer in self.trainers if answers(trainer)])
        alive = [trainer for trainer in self.trainers if answers(trainer)]
        parts = ray.get([trainer.weights.remote() for trainer in alive])
        self.published[self.version] = {name: each for part in parts for name, each in part.items()}
        begun = time.monotonic()
        try:
            outcome: SyncReport | WeightSyncError = self.move()
        except WeightSyncError as error:
            outcome = error
        # Connecting anew has a deadline of its own: a holder's process takes seconds to start.
        took = outcome.seconds if isinstance(outcome, SyncReport) else time.monotonic() - begun
        assert took < LIMIT_S, f"{took:.1f} s until {outcome}"
        assert (self.sync.version == self.version) == isinstance(outcome, SyncReport)
        self.committed.add(self.sync.version)
        self.log.add(str(outcome))
        return outcome

    def move(self) -> SyncReport:
        """The update itself."""
        return self.sync.update_weights(self.version)

    def update_all(self) -> SyncReport:
        """The next version, which has to reach everybody."""
        report = self.update()
        assert isinstance(report, SyncReport), report
        assert report.engines == dict.fromkeys(self._slots, self.version), report
        assert set(report.states.values()) == {"SERVING"}
        self.check()
        return report

    def check(self) -> None:
        """Who serves holds one committed version, bit for bit, and says so; nobody else answers."""
        serving, versions = self.sync.serving(any_version=True), self.sync.engine_versions()
        assert len({versions[name] for name in self.sync.serving()}) <= 1
        for name, handle in serving.items():
            assert versions[name] in self.committed
            wanted, found = (
                self.published[versions[name]],
                ray.get(handle.weights.remote(), timeout=patient(5)),
            )
            assert all(torch.equal(wanted[tensor], found[tensor]) for tensor in wanted), name
            assert ray.get(handle.generate.remote([[1]], {}), timeout=patient(5)).version == versions[name]
        for name in versions.keys() - serving.keys():
            assert self._is_silent(name), name

    def settle(self) -> None:
        """Until everything is healed that can be."""
        self.sync.settle(patient(30))
        self.check()

    def inject(self, *faults: Fault) -> None:
        self.sync.inject(FaultPlan(faults))

    def pid(self, process: str) -> int:
        """Of ``engine e0``, ``holder 0`` or ``trainer 0``."""
        kind, name = process.split(" ")
        if kind == "engine":
            return pid(self.sync.engines()[name])
        return pid(self.trainers[int(name)] if kind == "trainer" else self.sync.holders()[process])

    def replace_trainers(self) -> None:
        """Others for those that do not answer."""
        for rank, trainer in enumerate(self.trainers):
            if not answers(trainer):
                self.trainers[rank] = self.start_trainer(rank)
        ray.get([trainer.__ray_ready__.remote() for trainer in self.trainers])
        self.sync.register_trainers(self.trainers)

    def _is_silent(self, name: str) -> bool:
        handle = self.sync.engines()[name]
        try:
            ray.get(handle.generate.remote([[1]], {}), timeout=patient(0.5))
        except (StateError, RayActorError, GetTimeoutError):
            return True
        # It answers before the controller has heard that it may.
        return until(lambda: name in self.sync.serving(any_version=True), patient(2))

    def start_trainer(self, rank: int) -> Any:
        return spawn(Counting, WIDTH, self.slot(rank))

    def start_engine(self, name: str) -> Any:
        return spawn(Engine, WIDTH, name, self.slot(name))

    def slot(self, of: int | str) -> str:
        """The slot of a trainer, by its rank, or of an engine, by its name."""
        return f"faulty-{self._number}-{of}" if isinstance(of, int) else self._slots[of]

    def _respawn(self, name: str) -> Any:
        taken, self._standbys[name] = self._standbys[name], self.start_engine(name)
        return taken


class Heard(logging.Handler):
    """What this process is told while a test runs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger("weightsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(record.getMessage())

    def add(self, text: str) -> None:
        self._lines.append(text)

    def text(self) -> str:
        return "\n".join(self._lines)

    def clear(self) -> None:
        self._lines.clear()

    def close(self) -> None:
        logging.getLogger("weightsync").removeHandler(self)
        super().close()


def pid(actor: Any) -> int:
    found: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=patient(20))
    return found


def answers(actor: Any) -> bool:
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=patient(0.5))
    except (RayActorError, GetTimeoutError):
        return False
    return True


def process_state(number: int) -> str:
    """As psutil has it; nothing if there is no such process any more."""
    return rank_process.process_state(number)[1]


def end(number: int) -> None:
    if process_state(number):
        os.kill(number, signal.SIGKILL)


def healthy(fleet: Faulty) -> bool:
    return set(fleet.sync.engine_states().values()) == {EngineState.SERVING}


def starve(_: Holder) -> None:
    """In a holder's process: for its next feed it has the file descriptors that this takes, and no other."""
    open_feed = connecting.HolderFeed

    def starved(*args: Any) -> HolderFeed:
        connecting.HolderFeed = open_feed  # type: ignore[misc]
        room = open_feed(*args)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, hard))
        taken: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            room.close()
            return open_feed(*args)
        finally:
            for each in taken:
                os.close(each)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    connecting.HolderFeed = starved  # type: ignore[assignment, misc]
