"""Models of Megatron-Core, cut in every way: what all ranks declare together is the checkpoint."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.contract.megatron_ranks import (
    TOKENS,
    VOCAB,
    WORLD,
    Case,
    Held,
    assemble,
    plan_for,
    received,
    run_all,
)
from tests.forked import forking
from tests.patience import patient
from weightsync.memory.kernels.digests import tensor_digest

MEGATRON = importlib.util.find_spec("megatron") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MEGATRON, reason="needs megatron-core"),
]

CASES = (
    Case("dense", "llama", tp=2, answers=True),
    Case("tied", "qwen3", tp=2, answers=True),
    Case("tied stages", "qwen3", tp=2, pp=2),
    Case("tied virtual stages", "qwen3", tp=2, pp=2, chunks=2),
    Case("virtual stages", "llama", pp=2, chunks=2),
    Case("fewer groups than ranks", "qwen2", tp=4, answers=True),
    Case("experts", "qwen3_moe", ep=2, answers=True),
    Case("experts and tensors", "qwen3_moe", tp=2, ep=2, answers=True),
    Case("cut experts", "qwen3_moe", tp=2, ep=2, etp=2, answers=True),
    Case("experts and stages", "qwen3_moe", tp=2, pp=2, ep=2),
    Case("stacked experts", "qwen3_moe", tp=2, ep=2, is_stacked=True),
    Case("cut stacked experts", "qwen3_moe", ep=2, etp=2, is_stacked=True),
    Case("mixtral", "mixtral", tp=2, ep=4, answers=True),
    Case("shared experts", "glm4_moe", tp=2, ep=2, answers=True),
    Case("latent attention", "deepseek_v3", tp=2, ep=2, etp=2),
    Case("a gather that waits for the forward pass", "qwen3_moe", ep=2, is_stale=True),
    Case("latent attention and stages", "deepseek_v3", tp=2, pp=2, ep=2),
)

ON_DEMAND = {
    "tied",
    "experts",
    "cut experts",
    "experts and stages",
    "cut stacked experts",
    "mixtral",
    "latent attention and stages",
}
"""Cases that differ from others in one size alone; they run with ``-m faults``."""


HAS_STACKS = MEGATRON and version("megatron-core") < "0.17"
"""Whether there is the older grouped kernel: 0.16.1 has it, 0.19.2 does not."""


def cases(chosen: Iterable[Case] = CASES) -> list[Any]:
    """Return pytest parameters for `chosen` cases."""
    return [
        pytest.param(
            case,
            id=f"{case.name} {case.family}".replace(" ", "-"),
            marks=[
                *[pytest.mark.faults] * (case.name in ON_DEMAND),
                *[pytest.mark.skip("this Megatron-Core stacks no experts")]
                * (case.is_stacked and not HAS_STACKS),
            ],
        )
        for case in chosen
    ]


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_SHARED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen2": {"head_dim": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        **_SHARED,
        "attention_bias": True,
        "use_qk_norm": True,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {**_SHARED, **_LATENT, "num_key_value_heads": 4, "topk_group": 1},
}


def save(family: str, folder: Path) -> None:
    """Save a checkpoint of random weights, as transformers names and shapes them."""
    settings = {key: value for key, value in {**_SIZES, **FAMILIES[family]}.items() if value is not None}
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        save(family, found[family])
    return found


@pytest.fixture(scope="module")
def held(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Held]]:
    """What all ranks hold, of each case that a test will ask for."""
    context = forking()
    results = context.Queue()
    meeting = str(tmp_path_factory.mktemp("meeting") / "file")
    params = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = {
        each.params["case"].name for each in params if each and isinstance(each.params.get("case"), Case)
    }
    chosen = tuple(
        case
        for case in CASES
        if (case.name in wanted or not (case.name in ON_DEMAND or case.is_stale))
        and (HAS_STACKS or not case.is_stacked)
    )
    parent = context.Process(target=run_all, args=(meeting, chosen, folders, results))
    parent.start()
    found: dict[str, list[Held]] | Exception = results.get(timeout=patient(90))
    if isinstance(found, Exception):
        parent.kill()
        raise found
    parent.join(patient(30))
    return found


def checkpoint_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", cases())
def test_all_ranks_together_hold_the_checkpoint_bit_for_bit(
    case: Case, held: dict[str, list[Held]], folders: dict[str, Path]
) -> None:
    checkpoint = checkpoint_of(folders[case.family])
    found = assemble(held[case.name])
    assert sorted(found) == sorted(checkpoint)
    for name, tensor in checkpoint.items():
        assert torch.equal(found[name], tensor), name


def in_stacks(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts as engines name them."""
    found = {name: tensor for name, tensor in checkpoint.items() if not re.search(r"\.experts\.\d+\.", name)}
    for base in {name.partition(".experts.")[0] for name in {*checkpoint} - {*found}}:
        is_old = base.endswith("block_sparse_moe")
        leaves = ("w1", "w3", "w2") if is_old else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([checkpoint[f"{base}.experts.{number}.{leaf}.weight"] for number in range(4)])
            for leaf in leaves
        )
        both = "w1_w3" if is_old else "gate_up_proj"
        found |= {f"{base}.experts.{both}": torch.cat([gate, up], 1), f"{base}.experts.{leaves[2]}": down}
    return found


@pytest.mark.parametrize("case", cases())
def test_what_they_publish_is_the_checkpoint_once(
    case: Case, held: dict[str, list[Held]], folders: dict[str, Path]
) -> None:
    plan = plan_for([each.sent for each in held[case.name]])
    found = received(plan, held[case.name])
    checkpoint = in_stacks(checkpoint_of(folders[case.family]))
    assert sorted(found) == sorted(checkpoint)
    for number, meta in enumerate(plan.tensors):
        wanted = checkpoint[meta.name] * (1 + case.is_stale)
        assert torch.equal(found[meta.name], wanted), meta.name
        total = sum(each.digests[number] for each in held[case.name]) % 2**64
        assert total == tensor_digest(wanted, meta.shape), meta.name
    sizes = [sum(piece.nbytes for piece in plan.trainer_pieces(rank)) for rank in range(WORLD)]
    assert sum(sizes) == sum(meta.nbytes for meta in plan.tensors)
    assert min(sizes) > 0


@pytest.mark.parametrize("case", cases(case for case in CASES if case.answers))
def test_megatrons_forward_pass_answers_as_transformers_does(
    case: Case, held: dict[str, list[Held]], folders: dict[str, Path]
) -> None:
    """So the order of heads, of gate and up, and of experts is Megatron's, not only the test's."""
    model = AutoModelForCausalLM.from_pretrained(folders[case.family], dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits
    for each in held[case.name]:
        assert each.logits is not None
        torch.testing.assert_close(torch.from_numpy(each.logits), wanted, rtol=1e-4, atol=1e-4)


def test_a_tied_head_is_an_alias_on_the_stages_that_hold_the_embedding(held: dict[str, list[Held]]) -> None:
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    assert [each.layout.tied for each in held["tied stages"]] == [(pair,)] * WORLD
    assert {each.layout.tied for each in held["dense"]} == {()}


def test_ranks_say_which_stage_they_are(held: dict[str, list[Held]]) -> None:
    stages = [each.sent.stage for each in held["tied virtual stages"]]
    assert [stage and (stage.number, stage.shared) for stage in stages] == [
        (number, ("model.embed_tokens.weight",)) for number in (0, 0, 1, 1)
    ]


def test_names_of_several_chunks_begin_with_the_chunks_number(held: dict[str, list[Held]]) -> None:
    buffers = {segment.buffer for segment in held["virtual stages"][0].layout.segments}
    assert {name.split(".")[0] for name in buffers} == {"0", "1"}
