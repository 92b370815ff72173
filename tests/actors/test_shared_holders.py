"""All adapters of a WeightSync have their holders in the same processes, one for each place."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import RayError

from tests.fleets.actors import Trainer, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.ray.actor_class import actor_class
from weightsync.errors import NonfiniteError, WeightSyncError

pytestmark = pytest.mark.timeout(120)
WIDTH = 16
CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=patient(3), connect_timeout_s=patient(30), heartbeat_s=patient(1)
)
NAMES = ("math", "code", "chat")
MANY = [f"adapter {number}" for number in range(6)]
"""Their calls that always wait are more than one holder's process has threads."""
NUM_PLACES = 3
"""A trainer of adapters and two engines."""


class Rig:
    """A trainer of a base model, one of adapters, and two engines that serve them."""

    def __init__(self, sync: WeightSync, max_restarts: int = 0) -> None:
        """With `max_restarts`, Ray starts engines again, and nobody else does."""
        from tests.fleets.slots import AdapterTrainer

        self._max_restarts = max_restarts
        self.sync, self.versions, self.published = sync, dict[str, int](), dict[str, Any]()
        self.base, self.trainer = (
            spawn(Trainer, WIDTH, "shared-base"),
            spawn(AdapterTrainer, "shared-adapter"),
        )
        self.spawned: list[Any] = [self.base, self.trainer]
        sync.register_trainers([self.base])
        engines = {name: self.respawn(name) for name in ("e0", "e1")}
        sync.register_engines(engines, respawn=None if max_restarts else self.respawn)
        sync.connect()
        sync.update_weights()

    def respawn(self, name: str) -> Any:
        from tests.fleets.slots import SlotActor

        options = {"num_cpus": 0, "max_restarts": self._max_restarts}
        self.spawned.append(actor_class(SlotActor).options(**options).remote(WIDTH, name, f"shared-{name}"))
        return self.spawned[-1]

    def register(self, *names: str) -> None:
        for name in names:
            self.sync.register_adapter(name, [self.trainer])
            self.versions[name] = 0

    def update(self, *names: str) -> None:
        """Train, and move that to all engines, as the next version of each of `names`."""
        version = 1 + max(self.versions[name] for name in names)
        ray.get(self.trainer.train.remote(hash((version, names)) % 1000))
        weights = ray.get(self.trainer.weights.remote())
        report = self.sync.update_weights(version, components=[f"adapter {name}" for name in names])
        assert report.engines == {"e0": version, "e1": version}
        for name in names:
            self.versions[name], self.published[name] = version, weights

    def serves(self, *names: str) -> bool:
        """Whether each engine has the last version, and the bytes, of each of `names`."""
        engines = self.sync.engines().values()
        found = [(name, ray.get(each.adapter.remote(name))) for each in engines for name in names]
        return all(
            version == self.versions[name] and equal(self.published[name], held)
            for name, (version, held) in found
        )

    def close(self) -> None:
        for actor in self.spawned:
            ray.kill(actor)


def equal(wanted: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> bool:
    return wanted.keys() == held.keys() and all(torch.equal(wanted[each], held[each]) for each in wanted)


def processes() -> set[int]:
    """The processes of this cluster in which adapters have holders."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if Path(f"/proc/{each.pid}/comm").read_text().startswith("ray::HolderPart"):
                found.add(each.pid)
    return found


def used(pid: int) -> tuple[int, int, int]:
    """Count a process's segments of shared memory, open files and threads."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    process = psutil.Process(pid)
    return sum("memfd:weightsync" in line for line in maps), process.num_fds(), process.num_threads()


@pytest.fixture
def config() -> SyncConfig:
    return CONFIG


@pytest.fixture
def rig(config: SyncConfig) -> Iterator[Rig]:
    with WeightSync(config) as sync:
        rig = Rig(sync)
        yield rig
    assert until(lambda: not processes(), patient(10)), "close() ends them"
    rig.close()


def test_adapters_share_a_process_at_each_place(rig: Rig) -> None:
    rig.register("math", "code")
    rig.update("math", "code")
    rig.sync.settle(patient(10))
    held = processes()
    assert len(held) == NUM_PLACES
    before = {pid: used(pid) for pid in held}
    rig.register("chat")
    rig.update("chat")
    rig.sync.settle(patient(10))
    assert processes() == held
    assert all(mine > others for pid in held for mine, others in zip(used(pid), before[pid], strict=True))
    rig.sync.unregister_adapter("chat")
    # Of a node's threads, some may have ended since.
    assert until(
        lambda: all(use <= was for pid in held for use, was in zip(used(pid), before[pid], strict=True)),
        patient(10),
    )
    rig.update("code")
    assert rig.serves("math", "code")
    rig.sync.unregister_adapter("math")
    rig.update("code")
    assert rig.serves("code")
    assert processes() == held
    rig.sync.unregister_adapter("code")
    assert until(lambda: not processes(), patient(10)), "the last adapter has left"
    rig.register("math")
    rig.update("math")
    assert rig.serves("math")


def test_an_adapter_with_nan_is_refused(rig: Rig) -> None:
    rig.register("math")
    rig.update("math")
    ray.get(rig.trainer.diverge.remote())
    with pytest.raises(NonfiniteError, match=r"version 2: NaN or Inf in up.lora_A.weight \(1\)"):
        rig.sync.update_adapter("math")
    assert rig.serves("math"), "engines serve the version before it"
    rig.update("math")
    assert rig.serves("math")


@pytest.mark.faults
@pytest.mark.parametrize("config", [replace(CONFIG, nonfinite="warn")])
def test_an_adapter_with_nan_is_served_if_that_is_set(rig: Rig) -> None:
    rig.register("math")
    ray.get(rig.trainer.diverge.remote())
    assert rig.sync.update_adapter("math").nonfinite == {"up.lora_A.weight": 1}


@pytest.mark.faults
def test_adapters_that_move_at_the_same_time_do_not_wait_for_one_another(rig: Rig) -> None:
    """In each process, parts of all adapters wait for those of other processes at the same time."""
    rig.register(*MANY)
    for first in range(40):
        rig.update(*(MANY[(first + each) % len(MANY)] for each in range(len(MANY))))
    assert rig.serves(*MANY)
    assert len(processes()) == NUM_PLACES


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["ended", "stopped"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "in_turns"])
def test_a_process_that_is_lost_is_replaced_by_one_for_all_adapters(
    rig: Rig, number: signal.Signals, together: bool
) -> None:
    rig.register("math", "code")
    rig.update("math", "code")
    for victim in sorted(processes())[: None if number == signal.SIGKILL else 1]:
        others = processes() - {victim}
        os.kill(victim, number)
        steps = [("math", "code")] if together else [("math",), ("code",)]
        if number == signal.SIGSTOP:  # nothing says so before it is needed
            with pytest.raises(WeightSyncError, match="holder"):
                rig.update(*steps[0])
        else:
            assert until(lambda gone=victim: gone not in processes(), patient(10))
            with contextlib.suppress(WeightSyncError):  # the driver may not have heard of it yet
                rig.update(*steps[0])
        for names in steps:
            rig.update(*names)
        assert rig.serves("math", "code")
        found = processes()
        assert others < found
        assert len(found) == NUM_PLACES


@pytest.mark.faults
def test_an_adapter_that_is_registered_on_a_stopped_process_gets_another(rig: Rig) -> None:
    rig.register("math")
    rig.update("math")
    victim = min(processes())
    os.kill(victim, signal.SIGSTOP)
    rig.register("code")
    rig.update("code")
    rig.update("math")
    assert rig.serves("math", "code")
    assert len(processes() - {victim}) == len(processes()) == NUM_PLACES


@pytest.mark.faults
def test_an_engine_that_comes_back_or_joins_gets_all_adapters(rig: Rig) -> None:
    rig.register(*NAMES)
    for name in NAMES:
        rig.update(name)
    rig.sync.settle(patient(10))
    os.kill(ray.get(rig.sync.engines()["e1"].pid.remote()), signal.SIGKILL)
    assert until(lambda: _is_back(rig), patient(40))
    assert len(processes()) == NUM_PLACES
    rig.update(*NAMES)
    rig.sync.remove_engine("e1")
    rig.sync.add_engine("e1", rig.respawn("e1"))
    assert until(lambda: _is_back(rig), patient(40))
    rig.update(*NAMES)
    assert rig.serves(*NAMES)
    assert len(processes()) == NUM_PLACES


def _is_back(rig: Rig) -> bool:
    try:
        return rig.serves(*NAMES)
    except ray.exceptions.RayError:
        return False


@pytest.mark.faults
def test_an_actor_that_ray_started_again_gets_its_adapters_back(cluster: None) -> None:
    with WeightSync(CONFIG) as sync:
        rig = Rig(sync, max_restarts=1)
        rig.register("math", "code")
        rig.update("math", "code")
        engine = sync.engines()["e1"]
        os.kill(first := ray.get(engine.pid.remote()), signal.SIGKILL)

        def is_back() -> bool:
            with contextlib.suppress(RayError):
                return bool(ray.get(engine.pid.remote()) != first) and rig.serves("math", "code")
            return False

        assert until(is_back, patient(20), pause_s=0.5)
        rig.update("math")
        rig.update("code")
        assert rig.serves("math", "code")
    rig.close()
