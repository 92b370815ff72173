"""A fleet with a real vLLM of two ranks on the CPU, each rank a process beside the engine's actor."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from transformers import AutoModelForCausalLM

from tests.fleets.actors import spawn, until
from tests.fleets.faulty import Heard, process_state
from tests.models import build_tiny_qwen3, greedy, redraw
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.driver.engine_state import EngineState
from weightsync.faults import Fault, FaultPlan
from weightsync.report import SyncReport

VICTIM = "e1"
HEARTBEAT_S = patient(1)
TIMEOUT_S = patient(2.5)
LIMIT_S = 3 * TIMEOUT_S
START_S = patient(120)
OPTIONS = {"tensor_parallel_size": 2, "max_model_len": 128, "max_num_seqs": 8}
PROMPTS = [[7 * i + j + 3 for j in range(3 + i)] for i in range(4)]


def num_shared() -> int:
    """Files of Python's shared memory, through which ranks talk."""
    return len(list(Path("/dev/shm").glob("psm_*")))


class QwenTrainer(TrainerShard):
    def __init__(self, path: str, slot: str) -> None:
        super().__init__(slot)
        self.model = AutoModelForCausalLM.from_pretrained(path)

    def train(self, seed: int) -> None:
        redraw(self.model, seed)


class RankedEngine(EngineActor):
    async def rank_pids(self) -> list[int]:
        return [rank.pid for rank in self._engine.watch.ranks]


class Ranked:
    """One trainer; e0, of one rank, sits with it; e1 is a vLLM whose two ranks sit alone."""

    def __init__(self, folder: Path) -> None:
        self._model = build_tiny_qwen3(folder)
        self._path = str(folder)
        self.log = Heard()
        self.version = 0
        self.trainer = spawn(QwenTrainer, self._path, "ranked")
        engines = {"e0": spawn(EngineActor, "torch", self._path, "e0", {}, "ranked"), VICTIM: self._respawn()}
        config = SyncConfig(
            bucket_bytes=12 << 10,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=START_S,
            heartbeat_s=HEARTBEAT_S,
            heal_backoff_s=0.05,
        )
        self.sync = WeightSync(config)
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines(engines, respawn=lambda _: self._respawn())
        self.sync.connect()
        assert self.sync.plan.num_buckets >= 5
        self._num_shared = num_shared()

    def close(self) -> None:
        self.log.close()
        engines, ranks = self.sync.engines(), self._pids_if_there()
        self.sync.close()
        for actor in (self.trainer, *engines.values()):
            ray.kill(actor)
        assert until(lambda: not any(map(process_state, ranks)), patient(20))

    def update(self) -> SyncReport:
        """The next version, which has to commit on those that can take it, in time."""
        self.version += 1
        ray.get(self.trainer.train.remote(self.version))
        report = self.sync.update_weights(self.version)
        assert report.seconds < LIMIT_S
        assert self.sync.version == self.version
        return report

    def update_all(self) -> None:
        report = self.update()
        assert report.engines == {"e0": self.version, VICTIM: self.version}, report
        self.check()

    def check(self) -> None:
        """Who serves answers with the greedy tokens of the committed version, and with no other's."""
        redraw(self._model, self.version)
        wanted = greedy(self._model, PROMPTS, 8)
        assert "e0" in self.sync.serving()
        for name, handle in self.sync.serving().items():
            rollout = ray.get(handle.generate.remote(PROMPTS, {"max_tokens": 8, "temperature": 0.0}))
            assert rollout.tokens == wanted, name
            assert rollout.version == self.version, name

    def inject(self, *faults: Fault) -> None:
        self.sync.inject(FaultPlan(faults))

    def be_noticed(self, begun: float) -> None:
        """While nothing runs: within two heartbeats, and a moment for a busy host."""
        assert until(lambda: self.state() is EngineState.DEAD, 2 * HEARTBEAT_S + patient(1))
        assert time.monotonic() - begun < 2 * HEARTBEAT_S + patient(1)

    def be_healed(self, num_heals: int, rank: int, victims: list[int]) -> None:
        """Started anew and filled; of the old one nothing is left."""
        self.check()
        self.sync.settle(START_S)
        heal = self.sync.heals[-1]
        assert len(self.sync.heals) == num_heals + 1, self.log.text()
        assert (heal.engine, heal.version, heal.verified) == (VICTIM, self.version, True), heal
        assert heal.respawned_at is not None
        assert f"rank {rank}, is lost" in self.log.text()
        assert set(self.sync.engine_states().values()) == {EngineState.SERVING}
        self.check()
        assert until(lambda: not any(map(process_state, victims)), patient(5))
        assert until(lambda: num_shared() == self._num_shared, patient(5))

    def state(self) -> EngineState:
        return self.sync.engine_states()[VICTIM]

    def pids(self) -> list[int]:
        """Of the ranks, in their order."""
        found: list[int] = ray.get(self.sync.engines()[VICTIM].rank_pids.remote())
        return found

    def generate(self, max_tokens: int) -> Any:
        """A request to the victim that is under way."""
        settings: Mapping[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        return self.sync.engines()[VICTIM].generate.remote(PROMPTS, settings)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids()[rank], number)

    def _pids_if_there(self) -> list[int]:
        return self.pids() if self.state() is EngineState.SERVING else []

    def _respawn(self) -> Any:
        return spawn(RankedEngine, "vllm", self._path, VICTIM, OPTIONS, "ranked-x")
