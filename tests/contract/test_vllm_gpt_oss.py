"""vLLM's loader of GPT-OSS writes experts and sinks without their loaders: these become live all the same.

After two updates, a vLLM has what one has that loaded the second version's files, and says the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.conftest import Rig
from tests.contract.live_model import differing, held, logits_of
from tests.contract.test_vllm_quantized import Served
from tests.families import build_family
from tests.vllm_imports import vllm_before

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.skipif(
        vllm_before("0.31"), reason="this vLLM does not serve float32 GPT-OSS, nor from files"
    ),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

PROMPT = [5, 6, 7]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    models = [build_family(tmp_path / str(seed), "gpt_oss", seed) for seed in (1, 2)]
    rig = Rig("vllm", False, "host", tmp_path, models=models)
    yield rig
    rig.close()


def test_gpt_oss_has_what_one_has_that_loaded_the_files(rig: Rig, tmp_path: Path) -> None:
    for version, model in enumerate(rig.models, start=1):
        rig.update(model, version)
        tokens = rig.generate([PROMPT]).result().tokens
        assert rig.serves(model, [PROMPT], tokens)
    fed = held(live(rig))
    rig.update(rig.models[1], 3)
    again = held(live(rig))
    assert differing(fed, again) == [], "an equal update changes nothing"
    logits = logits_of(live(rig))
    assert rig.generate([PROMPT]).result().tokens == tokens
    rig.close()
    files = Served(tmp_path / "2", "auto", dtype="float32", max_model_len=128)
    loaded = held(files.runner.get_model())
    expected = logits_of(files.runner.get_model())
    assert files.says() == tokens[0]
    files.close()
    assert differing(again, loaded) == []
    assert "model.layers.0.attn.sinks" in loaded
    assert len(logits) == len(expected) == 16
    assert all(map(torch.equal, logits, expected))


def live(rig: Rig) -> nn.Module:
    return rig.engine.call(lambda llm: llm.model_executor.driver_worker.worker.model_runner.get_model())
