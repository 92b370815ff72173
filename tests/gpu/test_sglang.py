"""SGLang on GPUs: fed by us, it says bit for bit what it says when it starts from the checkpoint on disk.

`tests/contract/test_engines.py` has the rest, without CUDA graphs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.fed_engine import FedEngine
from tests.gpu.own_process import run
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import Answers, assert_same
from tests.gpu.sglang_probe import OPTIONS, answers_of
from weightsync.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(420),
]


def from_disk(
    checkpoints: list[str], num_ranks: int, env: Mapping[str, str] | None = None, **options: object
) -> list[Answers]:
    """Of an SGLang of its own; it has ended when this returns, and its memory is free.

    What it held is in ``live.json`` of the first checkpoint. `env`: further environment variables.
    `options`: further ones of its engine.
    """
    answers, held = (Path(checkpoints[0]) / name for name in ("answers.json", "live.json"))
    arguments = [str(num_ranks), json.dumps(options), str(answers), str(held), *checkpoints]
    run("tests.gpu.sglang_from_disk", *arguments, env=env)
    return json.loads(answers.read_text())


@pytest.mark.parametrize(("kind", "num_ranks"), [("tied", 1), ("moe", 1), ("untied", 2), ("moe", 2)])
def test_fed_live_it_answers_as_from_disk(tmp_path: Path, kind: str, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    paths = [str(tmp_path / str(seed)) for seed in range(2)]
    models = [save_qwen3(Path(path), kind, seed) for seed, path in enumerate(paths)]
    expected = from_disk(paths, num_ranks)
    assert expected[0] != expected[1]
    rig = FedEngine("sglang", paths[0], num_ranks, OPTIONS)
    try:
        rig.connect(models[0])
        assert len({layout.device for layout in rig.layouts}) == len(rig.layouts) == num_ranks
        assert all(layout.buffers for layout in rig.layouts), "see the log of weightsync.engines.sglang"
        addresses, sums = rig.addresses(), None
        for model, answers in zip(models, expected, strict=True):
            digests = rig.update(model)
            if num_ranks == 1:
                np.testing.assert_array_equal(digests[0], rig.sent(model))
            assert_same(answers_of(rig.engine), answers)
            assert sums != (sums := [rank["checksums"] for rank in rig.engine.checksums()])
        assert rig.addresses() == addresses
    finally:
        rig.close()


def test_experts_whose_rows_lie_in_another_order_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads gate and up rows by turns, as SGLang has put them when it started."""
    option = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    if not hasattr(importlib.import_module("sglang.srt.environ").envs, option):
        pytest.skip("this SGLang has no such option")
    monkeypatch.setenv(option, "1")
    model = save_qwen3(tmp_path / "0", "moe", 0)
    rig = FedEngine("sglang", str(tmp_path / "0"), 1, OPTIONS)
    try:
        with pytest.raises(ConfigError, match=option):
            rig.connect(model)
    finally:
        rig.close()
