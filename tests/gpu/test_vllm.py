"""vLLM on GPUs: fed by us, it says bit for bit what it says when it starts from the checkpoint on disk."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.gpu.fed_engine import FedEngine
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import Answers, assert_same
from tests.gpu.vllm_probe import OPTIONS, probe
from tests.patience import patient
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import named_tensors

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(420),
]


class VllmRig(FedEngine):
    def __init__(self, model_path: str, num_ranks: int) -> None:
        super().__init__("vllm", model_path, num_ranks, OPTIONS)

    def answers(self) -> Answers:
        """Asked of the engine itself, between two steps of its thread."""
        return self.engine.call(probe)


Open = Callable[[str, int], VllmRig]


@pytest.fixture
def open_rig() -> Iterator[Open]:
    rigs: list[VllmRig] = []

    def open_one(path: str, num_ranks: int) -> VllmRig:
        rigs.append(VllmRig(path, num_ranks))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


def save(folder: Path, kind: str, num_versions: int = 2) -> list[tuple[str, PreTrainedModel]]:
    paths = [folder / str(seed) for seed in range(num_versions)]
    return [(str(path), save_qwen3(path, kind, seed)) for seed, path in enumerate(paths)]


def served(checkpoint: str) -> str:
    """`checkpoint` under the one path by which every vLLM of a test knows its model.

    vLLM compiles once for each path, and its compiler times kernels to choose among them: two that
    were compiled apart may differ in the last bit of a float, and some tokens later in a word.
    """
    link = Path(checkpoint).parent / "served"
    link.with_name("next").symlink_to(checkpoint, target_is_directory=True)
    link.with_name("next").replace(link)  # at once: another vLLM may start from it
    return str(link)


def from_disk(
    checkpoint: str, num_ranks: int, env: Mapping[str, str] | None = None, **options: object
) -> Answers:
    """Of a vLLM of its own; it has ended when this returns, and its memory is free.

    What it held is in the checkpoint's ``live.json``. `env`: further environment variables. `options`:
    further arguments of the engine.
    """
    answers, held = (Path(checkpoint) / name for name in ("answers.json", "live.json"))
    arguments = [served(checkpoint), str(num_ranks), str(answers), str(held), json.dumps(options)]
    command = [sys.executable, "-m", "tests.gpu.vllm_from_disk", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answers.read_text())


def assert_live(rig: VllmRig) -> None:
    assert len(rig.layouts) == rig.num_ranks
    assert len({layout.device for layout in rig.layouts}) == rig.num_ranks
    for layout in rig.layouts:
        assert layout.device.startswith("cuda:")
        assert layout.buffers, "vLLM reloads here, see the log of weightsync.engines.vllm"


def whole_digests(model: PreTrainedModel, rig: VllmRig) -> np.ndarray:
    tensors = named_tensors(model)[0]
    digests = [tensor_digest(tensors[meta.name], meta.shape) for meta in rig.plan.tensors]
    return np.array(digests, dtype=np.uint64)


def test_one_rank_written_live_and_by_reload(open_rig: Open, tmp_path: Path) -> None:
    (path, first), (other, second) = save(tmp_path, "tied")
    expected, later = from_disk(path, 1), from_disk(other, 1)
    assert expected != later
    rig = open_rig(served(path), 1)
    rig.connect(first)
    assert_live(rig)
    addresses = rig.addresses()
    np.testing.assert_array_equal(rig.update(first)[0], whole_digests(first, rig))
    assert_same(rig.answers(), expected)
    np.testing.assert_array_equal(rig.update(second)[0], whole_digests(second, rig))
    assert_same(rig.answers(), later)

    rig.engine.on_ranks("reload")  # from now on it takes whole tensors, as one that cannot be written live
    rig.connect(first)
    assert not rig.layouts[0].buffers
    np.testing.assert_array_equal(rig.update(first)[0], whole_digests(first, rig))
    assert_same(rig.answers(), expected)
    assert rig.addresses() == addresses


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_their_own(open_rig: Open, tmp_path: Path, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    (path, first), (other, second) = save(tmp_path, "untied")
    later = from_disk(other, num_ranks)
    rig = open_rig(served(path), num_ranks)
    rig.connect(first)
    assert_live(rig)
    addresses = rig.addresses()
    rig.update(first)
    assert rig.answers() != later
    rig.update(second)
    assert_same(rig.answers(), later)
    assert rig.addresses() == addresses


def test_experts(open_rig: Open, tmp_path: Path) -> None:
    (path, first), (other, second) = save(tmp_path, "moe")
    later = from_disk(other, 1)
    rig = open_rig(served(path), 1)
    rig.connect(first)
    assert_live(rig)
    addresses = rig.addresses()
    rig.update(first)
    assert rig.answers() != later
    np.testing.assert_array_equal(rig.update(second)[0], whole_digests(second, rig))
    assert_same(rig.answers(), later)
    assert rig.addresses() == addresses
