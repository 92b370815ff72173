"""Real vLLMs over Ray that draft with MTP layers, which the trainer of their model holds."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from tests.contract.vllm_speculation import check_live_mtp
from tests.fleets.actors import spawn, until
from tests.mtp_models import FAMILIES, build_tiny_mtp, mtp_weights
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import VerifyError
from weightsync.faults import Fault, FaultPlan

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(
    bucket_bytes=16 << 10,  # so that the last of many buckets has a part of the draft
    timeout_s=patient(30),
    connect_timeout_s=patient(120),
    heartbeat_s=patient(1),
    components={"draft": "trained"},
)
PROMPTS = [[5, 9, 3, 7], [11, 2, 30]]
GREEDY: Mapping[str, Any] = {"max_tokens": 16, "temperature": 0.0}


class Fleet:
    """A trainer of a model and its MTP layer, and engines that have read files of another layer."""

    def __init__(self, folder: Path, family: str, apart: bool, num_ranks: int) -> None:
        from tests.fleets.mtp_trainer import MtpTrainer

        self.path, self.family, self.num_ranks = str(folder / "model"), family, num_ranks
        build_tiny_mtp(folder / "model", family, seed=0, mtp_seed=5)
        self.trainer = spawn(MtpTrainer, self.path, family, apart)
        self.engines: dict[str, ActorHandle[Any]] = {}

    def spawn(self, name: str) -> ActorHandle[Any]:
        from tests.fleets.draft_engine import DraftEngine

        speculative = {"method": "mtp", "num_speculative_tokens": 1}
        options: dict[str, Any] = {"speculative_config": speculative, "max_model_len": 64}
        options["tensor_parallel_size"] = self.num_ranks
        self.engines[name] = spawn(DraftEngine, "vllm", self.path, name, options, name)
        return self.engines[name]

    def register(self, sync: WeightSync) -> None:
        sync.register_trainers([self.trainer])
        sync.register_engines({"e0": self.spawn("e0")}, respawn=self.spawn)

    def train(self, model: int, draft: int) -> None:
        ray.get(self.trainer.train.remote(model, draft))

    def accepted(self) -> float:
        """Return the part of the drafted tokens of greedy answers that was accepted."""
        handle = self.engines["e0"]
        before = ray.get(handle.draft_counts.remote())
        ray.get(handle.generate.remote(PROMPTS, GREEDY), timeout=patient(60))
        counts = ray.get(handle.draft_counts.remote()).since(before)
        return counts.acceptance

    def check_draft(self) -> None:
        """Compare each byte of the engine's MTP layer with the trainer's."""
        live, trained = ray.get([self.engines["e0"].live_draft.remote(), self.trainer.mtp_weights.remote()])
        check_live_mtp(live, trained, FAMILIES[self.family])

    def close(self) -> None:
        """End all engines. A killed one leaves its ranks' shared memory."""
        ending = [engine.close.remote() for engine in self.engines.values()]
        ray.wait(ending, num_returns=len(ending), timeout=patient(30))
        for each in (*self.engines.values(), self.trainer):
            ray.kill(each)


@pytest.fixture
def apart() -> bool:
    return False


@pytest.fixture
def num_ranks() -> int:
    return 1


@pytest.fixture
def fleet(tmp_path: Path, family: str, apart: bool, num_ranks: int) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, family, apart, num_ranks)
    yield fleet
    fleet.close()


@pytest.mark.faults
@pytest.mark.parametrize("family", ["mimo"])
def test_mtp_layers_in_the_trainers_model_are_written_with_it(fleet: Fleet, tmp_path: Path) -> None:
    build_tiny_mtp(tmp_path / "files", "mimo", seed=1, mtp_seed=6)
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": fleet.spawn("e0")}, respawn=fleet.spawn)
        sync.register_checkpoint("files", [str(tmp_path / "files")])
        sync.connect()
        sync.update_weights(1, checkpoint="files")
        live = ray.get(fleet.engines["e0"].live_draft.remote())
        check_live_mtp(live, mtp_weights(tmp_path / "files", "mimo", 6), FAMILIES["mimo"])
        sync.register_trainers([fleet.trainer])
        sync.connect()
        for version, model, draft in ((2, 0, 0), (3, 0, 1), (4, 1, 0)):
            fleet.train(model, draft)
            assert sync.update_weights(version).engines == {"e0": version}
            fleet.check_draft()
            accepted = fleet.accepted()
            assert accepted == 1 if version == 2 else accepted < 0.5
        model, draft = sync.coverage()
        assert str(draft) == "e0, draft: version 4, what its loader got; 16 tensors, 199 kB"
        assert (model.component, model.version, model.num_tensors) == ("model", 4, 27)
        flip = Fault(process="engine e0", action="corrupt", at="move", bucket="last")
        sync.inject(FaultPlan((flip,)))
        fleet.train(0, 0)
        with pytest.raises(VerifyError, match=r"draft/model\.mtp_layers\.0\.") as caught:
            sync.update_weights(5)
        assert all(name.startswith("draft/") for name in caught.value.tensors)
        assert until(lambda: sync.engine_versions()["e0"] == 4, patient(60)), "healed, with both"
        sync.settle(patient(60))
        sync.update_weights(6)
        fleet.check_draft()
        assert fleet.accepted() == 1
        os.kill(ray.get(fleet.engines["e0"].pid.remote()), signal.SIGKILL)
        assert until(lambda: len(sync.heals) == 2, patient(120))
        sync.settle(patient(60))
        assert sync.engine_versions() == {"e0": 6}
        fleet.check_draft()
        assert fleet.accepted() == 1


@pytest.mark.faults
@pytest.mark.parametrize(
    ("family", "apart", "num_ranks"),
    [("glm", True, 1), ("glm", True, 2), ("mimo", True, 2)],
    ids=["glm-apart", "glm-apart-two-ranks", "mimo-apart-two-ranks"],
)
def test_mtp_layers_apart_from_the_model_and_on_two_ranks(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync)
        sync.connect()
        for version, model, draft in ((1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 0, 0)):
            fleet.train(model, draft)
            assert sync.update_weights(version).engines == {"e0": version}
            if fleet.num_ranks == 1:
                fleet.check_draft()
            accepted = fleet.accepted()
            assert accepted == 1 if version in (1, 4) else accepted < 0.5
