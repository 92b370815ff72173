"""A vLLM with DeepSeek-V3's MTP layer has what one has that loaded the files, derived tensors included.

vLLM 0.32 on a CPU answers otherwise than transformers for this model, so that two vLLMs are compared.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.conftest import Rig
from tests.contract.vllm_speculation import PROMPTS, check_live_mtp, check_version, live_draft, models
from tests.mtp_models import FAMILIES, build_tiny_mtp, mtp_weights

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),  # vLLM looks at all modules
]

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}
FAMILY = "deepseek"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An engine that has read the files of another MTP layer than its trainer's."""
    targets = [build_tiny_mtp(tmp_path / str(1 + seed), FAMILY, seed, mtp_seed=5) for seed in (0, 1)]
    weights, components = mtp_weights(tmp_path / "1", FAMILY, 0), {"draft": "trained"}
    rig = Rig("vllm", False, "host", tmp_path, components, weights, targets, speculative_config=SPECULATIVE)
    yield rig
    rig.close()


def test_it_has_what_one_has_that_loaded_the_files(rig: Rig, tmp_path: Path) -> None:
    assert check_version(rig, 1) == 1, "both say what a token alone leads to"
    rig.draft = mtp_weights(tmp_path / "1", FAMILY, 3)
    rig.update(rig.models[1], 2)
    check_live_mtp(rig.engine.call(live_draft), rig.draft, FAMILIES[FAMILY])
    fed, tokens = rig.engine.call(all_tensors), rig.generate(PROMPTS).result().tokens
    assert [name for name in fed if ".W_UV" in name and name.startswith("draft")], "made of kv_b_proj"
    rig.close()
    build_tiny_mtp(tmp_path / "files", FAMILY, 1, mtp_seed=3)
    loaded, expected = from_files(str(tmp_path / "files"), len(tokens[0]))
    assert fed.keys() == loaded.keys()
    assert [name for name, each in fed.items() if not torch.equal(each, loaded[name])] == []
    assert tokens == expected


def all_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Copy what modules of the target and of the draft hold, beside parameters, too."""
    found: dict[str, torch.Tensor] = {}
    for of, model in zip(("target", "draft"), models(engine), strict=True):
        for path, module in model.named_modules():
            its = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, each in itertools.chain(vars(module).items(), *its):
                if isinstance(each, torch.Tensor) and name != "kv_cache":
                    found[f"{of} {path}.{name}"] = each.detach().clone()
    return found


def from_files(path: str, num_tokens: int) -> tuple[Mapping[str, torch.Tensor], Sequence[Sequence[int]]]:
    """Return the tensors of a vLLM that loads `path` by itself, and what it answers."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    arguments = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    engine = LLMEngine.from_engine_args(
        EngineArgs(path, dtype="float32", speculative_config=SPECULATIVE, **arguments)
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"type": "token", "prompt_token_ids": prompt}, params)
    answers: dict[str, list[int]] = {}
    while len(answers) < len(PROMPTS):
        ended = [each for each in engine.step() if each.finished]
        answers |= {each.request_id: list(each.outputs[0].token_ids) for each in ended}
    found = all_tensors(engine)
    engine.engine_core.shutdown()
    return found, [answers[str(number)] for number in range(len(PROMPTS))]
