"""Drivers of one run, one after another, on a cluster that outlives them.

python -m tests.fleets.lasting first|second|third|last ADDRESS
python -m tests.fleets.lasting PHASE ADDRESS            dies by its own hand in that phase of the next update
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import ray
import torch

from tests.fleets.actors import Engine, Trainer, build
from tests.fleets.intercept import CALLS, intercept
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.holders.detached import actor_name, detached, end_all, find, names, run_prefix
from weightsync.driver.engine_state import EngineState
from weightsync.driver.verifying.comparison import Comparison
from weightsync.faults import Fault, FaultPlan

RUN, WIDTH = "lasting", 256
SYNC = SyncConfig(bucket_bytes=64 << 10, timeout_s=patient(20))


class CountingEngine(Engine):
    """Counts the loads that were asked of it, through Ray or over its channel."""

    num_loads = 0

    def __init__(self, width: int, name: str, slot: str) -> None:
        super().__init__(width, name, slot)
        load = self._engine.load

        def counted(attempt: int, timeout_s: float) -> Any:
            self.num_loads += 1
            return load(attempt, timeout_s)

        self._engine.load = counted


def first(sync: WeightSync) -> None:
    update(sync, 1)
    update(sync, 2)
    update(sync, 3)
    sync.settle(patient(20))
    say(sync)


def second(sync: WeightSync) -> None:
    say(sync)
    update(sync, 4)
    sync.settle(patient(20))
    slow = Fault(process="engine e1", action="slow", at="move", bucket="middle", seconds=5.0, version=5)
    sync.inject(FaultPlan((slow,)))
    train(sync, 5)
    sync.update_weights_async(5)
    written, deadline = trained(4), time.monotonic() + patient(20)
    while all(torch.equal(written[name], tensor) for name, tensor in weights(sync, "e1").items()):
        assert time.monotonic() < deadline, "no bucket came"
    assert sync.engine_states()["e1"] is EngineState.WRITING
    say(sync)


def third(sync: WeightSync) -> None:
    say(sync)
    update(sync, 5)
    say(sync)
    end(sync)


def last(sync: WeightSync) -> None:
    sync.settle(patient(20))
    say(sync)
    end(sync)


def end(sync: WeightSync) -> None:
    sync.close()
    sync.close()
    left = names(run_prefix(RUN))
    end_all(RUN)
    write(json.dumps({"left": left, "after": names(run_prefix(RUN))}))


def drive(address: str, stage: str) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": env})
    sync = WeightSync(SYNC, name=RUN)
    sync.register_trainers([member(Trainer, f"trainer {i}", WIDTH, str(i)) for i in range(2)])
    engines = {f"e{i}": member(CountingEngine, f"engine e{i}", WIDTH, f"e{i}", str(i)) for i in range(2)}
    sync.register_engines(engines)
    sync.connect()
    stages = {"first": first, "second": second, "third": third, "last": last}
    stages.get(stage, lambda sync: die(sync, stage))(sync)
    sys.stdin.read()


def die(sync: WeightSync, phase: str) -> None:
    """Say what was found, then die in the next update, or in what follows it."""
    sync.settle(patient(20))
    say(sync)
    if phase == "verify":
        Comparison.wrong = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    else:
        intercept(CALLS[phase], lambda call: lambda *args: dying(call(*args)))
    version = sync.version + 1
    if phase == "refill":
        sync.inject(FaultPlan((Fault(process="engine e1", action="error", at="move", version=version),)))
    update(sync, version)


async def dying(work: Coroutine[object, object, object]) -> None:
    """Where the work has got to by then is left to chance: the next driver has to cope with all of it."""
    begun = asyncio.ensure_future(work)
    await asyncio.wait([begun], timeout=random.uniform(0.0, 0.02))
    os.kill(os.getpid(), signal.SIGKILL)


def member(cls: type, process: str, *args: object) -> Any:
    name = actor_name(RUN, process)
    actor = ray.remote(cls).options(num_cpus=0, max_restarts=0, **detached(name))
    return find(name) or actor.remote(*args)


def train(sync: WeightSync, version: int) -> None:
    ray.get([trainer.train.remote(version) for trainer in sync.trainers()])


def update(sync: WeightSync, version: int) -> None:
    train(sync, version)
    sync.update_weights(version)


def trained(version: int) -> dict[str, torch.Tensor]:
    """What `train` makes."""
    model = build(WIDTH)
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.state_dict()


def weights(sync: WeightSync, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ray.get(sync.engines()[name].weights.remote())
    return found


def say(sync: WeightSync) -> None:
    """What is to be seen from outside, as one line of JSON."""
    engines = sync.engines()
    held = {name: weights(sync, name) for name in engines}
    wanted = trained(sync.version)
    actors = {f"trainer {i}": handle for i, handle in enumerate(sync.trainers())}
    actors |= engines | sync.holders()
    said = {
        "version": sync.version,
        "serving": sorted(sync.serving()),
        "engines": sync.engine_versions(),
        "states": {name: state.value for name, state in sync.engine_states().items()},
        "exact": {n: all(torch.equal(wanted[t], found[t]) for t in wanted) for n, found in held.items()},
        "loads": {n: ray.get(e.__ray_call__.remote(lambda self: self.num_loads)) for n, e in engines.items()},
        "pids": {process: ray.get(handle.__ray_call__.remote(_pid)) for process, handle in actors.items()},
    }
    write(json.dumps(said))


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _pid(_: object) -> int:
    return os.getpid()


if __name__ == "__main__":
    drive(sys.argv[2], sys.argv[1])
