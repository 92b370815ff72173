"""A real vLLM whose weights are quantized: every tensor that its reload fills has to come."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import build_tiny_qwen3, pack_int4
from weightsync.engines.vllm_api import Reload, set_environment, stop

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.faults,
    pytest.mark.timeout(400),
]


class Served:
    """vLLM in this process, and its model."""

    def __init__(self, folder: Path, load_format: str) -> None:
        set_environment()
        from vllm import LLM, SamplingParams

        self._llm: Any = LLM(
            str(folder),
            load_format=load_format,
            dtype="bfloat16",
            max_model_len=64,
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
        self._params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        self.runner = executor.driver_worker.worker.model_runner

    def says(self) -> list[int]:
        self._llm.reset_prefix_cache()
        (done,) = self._llm.generate([{"prompt_token_ids": [5, 6, 7]}], self._params, use_tqdm=False)
        return list(done.outputs[0].token_ids)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        reload = Reload(self.runner.get_model(), self.runner.model_config, torch.device("cpu"))
        try:
            reload.load(tensors.items())
            reload.finish()
        except RuntimeError:
            reload.abandon()
            raise

    def close(self) -> None:
        stop(self._llm.llm_engine)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    build_tiny_qwen3(tmp_path)
    return tmp_path, pack_int4(tmp_path)


@pytest.fixture
def from_disk(checkpoint) -> list[int]:
    served = Served(checkpoint[0], "auto")
    said = served.says()
    served.close()
    return said


@pytest.fixture
def dummy(checkpoint, from_disk) -> Iterator[Served]:
    served = Served(checkpoint[0], "dummy")
    yield served
    served.close()


def test_each_tensor_of_a_quantized_checkpoint_has_to_come(
    checkpoint, from_disk: list[int], dummy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = checkpoint[1]
    assert dummy.says() != from_disk
    for again in (False, True):
        # Once the checkpoint has filled the model, the tensors themselves are compared with it.
        for without, first, later in (
            (
                "layers.0.mlp.down_proj.weight_scale",
                r"layers\.0\.mlp\.down_proj\.weight_scale: 1 ",
                r"layers\.0\.mlp\.down_proj\.weight_scale \(64, 4\): 1 ",
            ),
            (
                "layers.1.self_attn.k_proj.weight_packed",
                r"qkv_proj\.weight_packed \(1536 of 2048 elements came\)",
                r"k_proj\.weight_packed \(64, 8\): 1 ",
            ),
        ):
            if again:
                dummy.load(tensors)
            with pytest.raises(RuntimeError, match=f"vLLM's loader left out .*{later if again else first}"):
                dummy.load({name: value for name, value in tensors.items() if without not in name})
        dummy.load(tensors)
        assert dummy.says() == from_disk
    assert "Failed to load weights" not in caplog.text
