"""What vLLM itself does to other requests when an adapter runs: why adapters with NaN are refused by default.

No code of ours fills the slots here. If one of these tests fails, vLLM has changed, and
docs/internals/adapters.md too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.conftest import Rig
from tests.models import build_tiny_qwen3

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.faults,
    pytest.mark.timeout(300),
]

DRAW = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 250, (length,), generator=DRAW).tolist() for length in (3, 5, 9, 17, 30, 40)]
NUMBERS = {"sound": 1, "other": 2, "broken": 3}


def save(base: str, folder: Path) -> None:
    """Save adapters of `base` as PEFT does. The broken one has NaN in each B."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for name, number in NUMBERS.items():
        config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        for parameter, values in model.named_parameters():
            if ".default." in parameter:
                torch.nn.init.normal_(values, 0, 0.3, torch.Generator().manual_seed(number))
                if name == "broken" and "lora_B" in parameter:
                    torch.nn.init.constant_(values, float("nan"))
        model.save_pretrained(folder / name)


class Vllm:
    """A real vLLM with the base weights, which gets adapters by files."""

    def __init__(self, folder: Path, max_loras: int, **more: object) -> None:
        options = {"enable_lora": True, "max_loras": max_loras, "max_lora_rank": 8, **more}
        self.rig, self._folder, self._count = Rig("vllm", False, "host", folder, **options), folder, 0
        self.rig.update(self.rig.models[0], 1)
        self.close = self.rig.close

    def answers(self, prompts: Sequence[list[int]], adapters: Sequence[str]) -> list[list[int]]:
        """Run requests in one batch, each with the adapter of its name, or with none."""
        return self.rig.engine.call(lambda llm: self._run(llm, prompts, adapters))

    def _run(self, llm: Any, prompts: Sequence[list[int]], adapters: Sequence[str]) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        begun = self._count
        for prompt, adapter in zip(prompts, adapters, strict=True):
            lora = adapter and LoRARequest(adapter, NUMBERS[adapter], str(self._folder / adapter))
            params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
            tokens = {"type": "token", "prompt_token_ids": prompt}
            llm.add_request(str(self._count), tokens, params, lora_request=lora or None)
            self._count += 1
        held: dict[int, list[int]] = {}
        while llm.has_unfinished_requests():
            held |= {int(each.request_id): list(each.outputs[0].token_ids) for each in llm.step()}
        llm.reset_prefix_cache()
        return [held[number] for number in range(begun, self._count)]

    def forget_values(self) -> None:
        """Set the KV cache to zero."""
        self.rig.engine.call(
            lambda llm: [
                cache.zero_() for cache in llm.model_executor.driver_worker.worker.model_runner.kv_caches
            ]
        )


@pytest.fixture
def vllm(tmp_path: Path, max_loras: int) -> Iterator[Vllm]:
    vllm = Vllm(tmp_path, max_loras)
    build_tiny_qwen3(tmp_path / "base")
    save(str(tmp_path / "base"), tmp_path)
    yield vllm
    vllm.close()


@pytest.mark.parametrize("max_loras", [4])
def test_nan_of_one_request_stays_in_the_kv_cache_for_the_next_ones(vllm: Vllm) -> None:
    everybody = [*PROMPTS, *PROMPTS], ["", "sound"] * len(PROMPTS)
    wanted = vllm.answers(*everybody)
    assert vllm.answers(*everybody) == wanted
    vllm.answers(PROMPTS, ["broken"] * len(PROMPTS))
    assert vllm.answers(*everybody) != wanted, "vLLM has mended it: say so in docs/internals/adapters.md"
    vllm.forget_values()
    assert vllm.answers(*everybody) == wanted


@pytest.mark.parametrize("max_loras", [2, 3])
def test_the_last_slot_is_added_to_requests_of_the_base_in_the_same_batch(vllm: Vllm, max_loras: int) -> None:
    alone = [vllm.answers([prompt], [""]) for prompt in PROMPTS]
    vllm.answers(PROMPTS[:1], ["sound"])
    vllm.answers(PROMPTS[:1], ["other"])  # in the second slot
    mixed = vllm.answers([*PROMPTS, PROMPTS[0]], [""] * len(PROMPTS) + ["sound"])[:-1]
    assert ([[each] for each in mixed] == alone) == (max_loras > 2)
