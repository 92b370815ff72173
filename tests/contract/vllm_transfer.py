"""A trainer that pushes weights into a real vLLM by its own weight transfer; run by test_vllm_transfer.py.

    python -m tests.contract.vllm_transfer FOLDER

The folder is on the path of vLLM's processes too, with the entry points of this project.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pages import run_block
from tests.patience import patient

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

PROMPTS = [[5, 6, 7], [200, 3, 90, 41], [11] * 6]
TIMEOUT_S = patient(60)
HERE = {'"10.0.0.1"': '"127.0.0.1"', '"nccl"': '"gloo"'}


class Client:
    """Calls the engine of this process, as RayVLLMWeightSyncClient calls actors."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update()


def main(folder: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    from tests.models import build_tiny_qwen3, greedy

    models = [build_tiny_qwen3(folder / str(seed), seed=seed) for seed in (1, 2)]
    small = partial(LLM, dtype="float32", max_model_len=64, skip_tokenizer_init=True, enforce_eager=True)
    names = {"LLM": small, "WeightTransferConfig": WeightTransferConfig, "path": str(folder / "1")}
    llm = run_block("docs/guide.md", 3, names)["llm"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)

    def said() -> list[list[int]]:
        done = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    # Only now: its digests need numba, with whose modules vLLM does not start on a CPU without Triton.
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from weightsync.plugins.vllm_trainer import WeightSyncTrainerInitInfo

    class Switch(ModuleSource):
        """The weights of `model`, but for those whose names contain `without`."""

        without = "nothing"

        def __init__(self) -> None:
            self.model = models[0]

        def __iter__(self):
            self._module = self.model
            yield from ((name, each) for name, each in super().__iter__() if self.without not in name)

        def metadata(self):
            self._module = self.model
            return super().metadata()

    source = Switch()
    info = WeightSyncTrainerInitInfo(
        host="127.0.0.1", world_size=2, transport="gloo", bucket_nbytes=20_000, timeout_s=TIMEOUT_S, rank=0
    )
    start = partial(WeightTransferTrainerFactory.trainer_init, info, client=Client(llm), source=source)
    trainer = start()
    wanted = [greedy(model, PROMPTS) for model in models]
    assert wanted[0] != wanted[1] != said()
    for model, tokens in zip(models, wanted, strict=True):
        source.model = model
        trainer.send_weights()
        llm.reset_prefix_cache()
        assert said() == tokens, "not the trainer's tokens"
    source.model = models[0]
    for source.without, named in (
        ("layers.1.mlp", r"layers.1.mlp.down_proj.weight \(64, 128\), "),
        ("1.self_attn.k_proj", r"layers.1.self_attn.qkv_proj.weight \(12288 of 16384 elements came\)"),
    ):
        with pytest.raises(Exception, match=f"vLLM's loader left out model.{named}"):
            trainer.send_weights()
        trainer = start()
    source.without = "nothing"
    trainer.send_weights()
    llm.reset_prefix_cache()
    assert said() == wanted[0], "not the trainer's tokens after an update that failed"
    trainer.shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.distributed.weight_transfer.RayVLLMWeightSyncClient", Client)  # llm is no actor
        names = {"engines": llm, "model": models[1], "num_workers": 1, "rank": 0}
        names = run_block("docs/guide.md", 4, names, HERE)
    llm.reset_prefix_cache()
    assert said() == wanted[1], "not the trainer's tokens, as the page sends them"
    names["trainer"].shutdown()
    names = run_block("docs/guide.md", 5, {"llm": llm, "model": models[0], "num_workers": 1}, HERE)
    llm.reset_prefix_cache()
    assert said() == wanted[0], "not the trainer's tokens, as the page's sender sends them"
    names["sender"].close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
