"""Ending a process, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import ray

from tests.fleets.actors import until
from tests.fleets.faulty import process_state
from tests.patience import patient
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.process import end_process


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_what_an_actor_started_ends_with_it_and_its_shared_memory_is_freed(
    cluster: None, is_stopped: bool
) -> None:
    class Sharing:
        """As an engine that talks with its ranks."""

        def start(self) -> tuple[str, list[int]]:
            self.memory = SharedMemory(create=True, size=4096)
            self.rank = subprocess.Popen(["sleep", "600"])
            return self.memory.name, [os.getpid(), self.rank.pid]

    actor = ray.remote(Sharing).options(num_cpus=0).remote()
    name, pids = ray.get(actor.start.remote())
    if is_stopped:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert (Path("/dev/shm") / name).exists()
    end_process(actor, [Placement(ray.get_runtime_context().get_node_id(), "", "", pids[0])])
    assert not any(map(process_state, pids))
    assert until(lambda: not (Path("/dev/shm") / name).exists(), patient(10))
