"""Real vLLMs with a draft model, over Ray: frozen on purpose, compared, and loaded again after a crash."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from tests.fleets.actors import spawn, until
from tests.models import build_tiny_qwen3, greedy
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, EngineActor, SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.errors import EngineError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(
    timeout_s=patient(30),
    connect_timeout_s=patient(120),
    heartbeat_s=patient(1),
    components={"draft": "frozen"},
)
PROMPTS = [[5, 9, 3, 7], [11, 2, 30]]
GREEDY: Mapping[str, Any] = {"max_tokens": 16, "temperature": 0.0}


class Fleet:
    """Engines with a draft that equals the target once it has checkpoint "base"."""

    def __init__(self, folder: Path, num_ranks: int = 1) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        for name, seed in (("base", 0), ("other", 1), ("draft", 0)):
            build_tiny_qwen3(folder / name, seed=seed)
        self.engines: dict[str, Any] = {}

    def spawn(self, name: str) -> ActorHandle[Any]:
        from tests.fleets.draft_engine import DraftEngine

        speculative = {
            "method": "draft_model",
            "model": str(self.folder / "draft"),
            "num_speculative_tokens": 2,
            "draft_tensor_parallel_size": self.num_ranks,
        }
        options: dict[str, Any] = {"speculative_config": speculative, "max_model_len": 64}
        options["tensor_parallel_size"] = self.num_ranks
        self.engines[name] = spawn(DraftEngine, "vllm", str(self.folder / "base"), name, options, name)
        return self.engines[name]

    def register(self, sync: WeightSync, *names: str) -> None:
        sync.register_engines({name: self.spawn(name) for name in names}, respawn=self.spawn)
        for name in ("base", "other"):
            sync.register_checkpoint(name, [str(self.folder / name)])

    def ask(self, engine: str) -> tuple[list[list[int]], float]:
        """Return greedy tokens, and the part of the drafted ones that were accepted."""
        handle = self.engines[engine]
        before = ray.get(handle.draft_counts.remote())
        tokens = ray.get(handle.generate.remote(PROMPTS, GREEDY), timeout=patient(60)).tokens
        counts = ray.get(handle.draft_counts.remote()).since(before)
        return tokens, counts.acceptance

    def close(self) -> None:
        """End all engines. A killed one leaves its ranks' shared memory."""
        ending = [engine.close.remote() for engine in self.engines.values()]
        ray.wait(ending, num_returns=len(ending), timeout=patient(30))
        for engine in self.engines.values():
            ray.kill(engine)


@pytest.fixture
def num_ranks() -> int:
    return 1


@pytest.fixture
def fleet(tmp_path: Path, num_ranks: int) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, num_ranks)
    yield fleet
    fleet.close()


@pytest.mark.faults
def test_a_draft_that_nobody_covers_does_not_connect_and_a_frozen_one_does(fleet: Fleet) -> None:
    with WeightSync(SyncConfig(connect_timeout_s=patient(120))) as sync:
        fleet.register(sync, "e0")
        refused = (
            r"speculative_config of engine e0: \{'method': 'draft_model', 'model': '.*/draft'\} .*"
            r'components=\{"draft": "frozen"\}.*or leave speculative decoding out'
        )
        with pytest.raises(ConfigError, match=refused):
            sync.connect()
    with WeightSync(CONFIG) as sync:
        sync.register_engines(fleet.engines)
        for name in ("base", "other"):
            sync.register_checkpoint(name, [str(fleet.folder / name)])
        sync.connect()
        seen = []
        for version, name in ((1, "base"), (2, "other"), (3, "base")):
            assert sync.update_weights(version, checkpoint=name).engines == {"e0": version}
            seen.append(fleet.ask("e0"))
        assert seen[0] == seen[2]
        assert seen[0][1] == 1, "the draft equals the target"
        assert seen[1][0] != seen[0][0]
        assert seen[1][1] < 0.5
        model, draft = sync.coverage()
        assert (model.component, model.num_frozen) == ("model", 0)
        assert (draft.component, draft.version, draft.num_tensors, draft.num_frozen) == ("draft", 3, 21, 21)
        assert str(draft) == (
            "e0, draft: version 3, live weights with those at its start; 21 tensors, all frozen, 657 kB"
        )


@pytest.mark.faults
@pytest.mark.parametrize("num_ranks", [2])
def test_two_ranks_each_compare_their_part_of_the_draft(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0")
        sync.connect()
        seen = []
        for version, name in ((1, "base"), (2, "other"), (3, "base")):
            assert sync.update_weights(version, checkpoint=name).engines == {"e0": version}
            seen.append(fleet.ask("e0"))
        assert seen[0] == seen[2]
        assert seen[0][1] == 1
        assert seen[1][1] < 0.5
        row = sync.coverage()[1]
        assert (row.component, row.num_tensors, row.num_frozen) == ("draft", 21, 21)
        assert row.proof == "live weights with those at its start"


@pytest.mark.faults
def test_a_killed_engine_gets_the_same_draft_again_or_does_not_come_back(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0", "e1")
        sync.connect()
        sync.update_weights(1, checkpoint="base")
        answer = fleet.ask("e0")
        assert answer == fleet.ask("e1")
        assert answer[1] == 1
        os.kill(ray.get(fleet.engines["e0"].pid.remote()), signal.SIGKILL)
        assert until(lambda: len(sync.heals) == 1, patient(120))
        sync.settle(patient(60))
        assert fleet.ask("e0") == answer
        assert [str(row).split(";")[0] for row in sync.coverage() if row.component == "draft"] == [
            f"{name}, draft: version 1, live weights with those at its start" for name in ("e0", "e1")
        ]
        build_tiny_qwen3(fleet.folder / "draft", seed=7)
        os.kill(ray.get(fleet.engines["e0"].pid.remote()), signal.SIGKILL)
        assert until(lambda: sync.engine_versions()["e0"] == 0, patient(60))
        sync.settle(patient(120))
        assert sync.engine_versions() == {"e0": 0, "e1": 1}
        with pytest.raises(ConfigError, match=r"engine e2: .*its bytes in rank 0 .* engine e0 has others"):
            sync.add_engine("e2", fleet.spawn("e2"))
        assert sync.engine_states()["e0"] is EngineState.DEAD
        assert sync.update_weights(2, checkpoint="other").engines == {"e0": 0, "e1": 2}
        build_tiny_qwen3(fleet.folder / "draft", seed=0)
        sync.add_engine("e0", fleet.spawn("e0"))
        assert sync.update_weights(3, checkpoint="base").engines == {"e0": 3, "e1": 3}
        assert fleet.ask("e0") == answer


@pytest.mark.faults
def test_a_draft_that_changed_fails_its_engine_which_is_respawned(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0", "e1")
        sync.connect()
        sync.update_weights(1, checkpoint="base")
        ray.get(fleet.engines["e0"].spoil.remote())
        report = sync.update_weights(2, checkpoint="other")
        assert report.engines == {"e0": 0, "e1": 2}
        assert "verify: draft model.norm.weight: bytes are not those" in report.failures["e0"]
        assert until(lambda: sync.engine_versions() == {"e0": 2, "e1": 2}, patient(120))
        sync.settle(patient(60))
        assert fleet.ask("e0") == fleet.ask("e1")
        assert sync.update_weights(3, checkpoint="base").engines == {"e0": 3, "e1": 3}
        assert fleet.ask("e0")[1] == 1
    with WeightSync(CONFIG) as sync:  # alone, with nothing to respawn it
        sync.register_engines({"e0": fleet.engines["e0"]})
        sync.register_checkpoint("base", [str(fleet.folder / "base")])
        sync.connect()
        ray.get(fleet.engines["e0"].spoil.remote())
        with pytest.raises(EngineError, match=r"draft model\.norm\.weight"):
            sync.update_weights(4, checkpoint="base")


@pytest.mark.faults
def test_an_engine_that_its_user_made_follows_the_same_rules(tmp_path: Path) -> None:
    from tests.fleets.draft_engine import OwnEngine

    models = {
        name: build_tiny_qwen3(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1))
    }
    speculative = {"method": "draft_model", "model": str(tmp_path / "base"), "num_speculative_tokens": 2}
    engine = spawn(OwnEngine, str(tmp_path / "base"), speculative)
    for config in (replace(CONFIG, components={}), CONFIG):
        with WeightSync(config) as sync:
            sync.register_engines({"e0": engine})
            for name in models:
                sync.register_checkpoint(name, [str(tmp_path / name)])
            if not config.components:
                with pytest.raises(ConfigError, match=r"speculative_config of engine e0: .*'draft_model'"):
                    sync.connect()
                continue
            sync.connect()
            for version, name in ((1, "base"), (2, "other")):
                assert sync.update_weights(version, checkpoint=name).engines == {"e0": version}
                asked = engine.generate.remote(PROMPTS[0], 16)
                assert ray.get(asked, timeout=patient(60)) == greedy(models[name], PROMPTS[:1])[0]
            assert [row.component for row in sync.coverage()] == ["model", "draft"]
    ray.get(engine.end.remote())
    ray.kill(engine)


@pytest.mark.faults
def test_the_pages_block_prints_what_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, draft = str(tmp_path / "base"), str(tmp_path / "draft")
    build_tiny_qwen3(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "draft")
    names = {"ray": ray, "WeightSync": WeightSync, "SyncConfig": SyncConfig, "EngineActor": EngineActor}
    names |= {"path": path, "draft_path": draft}
    names = run_block("docs/drafts.md", 0, names)
    printed = capsys.readouterr().out
    assert "e0, model: version 1, what its loader got" in printed
    assert "e0, draft: version 1, live weights with those at its start; 21 tensors" in printed
    ray.kill(names["engine"])
