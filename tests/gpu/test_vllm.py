"""vLLM on GPUs: fed by us, it says bit for bit what it says when it starts from the checkpoint on disk."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.gpu.fed_engine import FedEngine
from tests.gpu.own_process import run
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import Answers, assert_same
from tests.gpu.vllm_probe import OPTIONS, probe

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
    run("tests.gpu.vllm_from_disk", *arguments, env=env)
    return json.loads(answers.read_text())


def assert_live(rig: VllmRig) -> None:
    assert len(rig.layouts) == rig.num_ranks
    assert len({layout.device for layout in rig.layouts}) == rig.num_ranks
    for layout in rig.layouts:
        assert layout.device.startswith("cuda:")
        assert layout.buffers, "vLLM reloads here, see the log of weightsync.engines.vllm"


def test_one_rank_written_live_and_by_reload(open_rig: Open, tmp_path: Path) -> None:
    (path, first), (other, second) = save(tmp_path, "tied")
    expected, later = from_disk(path, 1), from_disk(other, 1)
    assert expected != later
    rig = open_rig(served(path), 1)
    rig.connect(first)
    assert_live(rig)
    addresses = rig.addresses()
    np.testing.assert_array_equal(rig.update(first)[0], rig.sent(first))
    assert_same(rig.answers(), expected)
    np.testing.assert_array_equal(rig.update(second)[0], rig.sent(second))
    assert_same(rig.answers(), later)

    rig.engine.on_ranks("reload")  # from now on it takes whole tensors, as one that cannot be written live
    rig.connect(first)
    assert not rig.layouts[0].buffers
    np.testing.assert_array_equal(rig.update(first)[0], rig.sent(first))
    assert_same(rig.answers(), expected)
    assert rig.addresses() == addresses


@pytest.mark.parametrize(("kind", "num_ranks"), [("untied", 2), ("untied", 4), ("moe", 1)])
def test_ranks_and_experts(open_rig: Open, tmp_path: Path, kind: str, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    (path, first), (other, second) = save(tmp_path, kind)
    later = from_disk(other, num_ranks)
    rig = open_rig(served(path), num_ranks)
    rig.connect(first)
    assert_live(rig)
    addresses = rig.addresses()
    rig.update(first)
    assert rig.answers() != later
    digests = rig.update(second)
    if num_ranks == 1:
        np.testing.assert_array_equal(digests[0], rig.sent(second))
    assert_same(rig.answers(), later)
    assert rig.addresses() == addresses
