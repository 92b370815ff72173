"""What a vLLM that speculates has in memory, and how much of it the target accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tests.mtp_models import Family
from weightsync.engines.drafts.draft_model import own_modules, own_tensors
from weightsync.engines.vllm.draft import VllmDraft

if TYPE_CHECKING:
    from tests.contract.conftest import Rig

PROMPTS = [[5, 9, 3, 5, 9], [7, 7, 7, 7], [40, 2, 61, 17, 8, 2]]
"""Prompts that repeat tokens, for n-grams to be found."""

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MTP_PARTS = {**_PARTS, "w13_weight": ("gate_up_proj",), "w2_weight": ("down_proj",)}
_MTP_PARTS |= {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
_EXPERTS = ("w13_weight", "w2_weight")
_TIED = "embed_tokens.weight"


def models(engine: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the target and the draft of an engine with one rank."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    return runner.get_model(), runner.get_draft_model()


def live_draft(engine: Any) -> dict[str, torch.Tensor]:
    """Copy a draft's own tensors, and the weights of its packed layers, by the names of its parameters."""
    target, draft = models(engine)
    held = {name: each.detach().clone() for name, each in own_tensors(draft, target).items()}
    own = {name for name, _ in own_modules(draft, target)}
    weights = ((name, each) for name, each in VllmDraft("", "", draft).packed() if name in own)
    packed = {f"{name}.weight": each.T.clone() for name, each in weights}
    return {**held, **packed}


def check_live(live: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> None:
    """Compare a draft's live memory, which vLLM fuses and packs, with a trainer's. No tensor may be left."""
    wanted = {name.removeprefix("model.").replace("midlayer", "layers.0"): trained[name] for name in trained}
    wanted = {name.replace("d2t", "draft_id_to_target_id"): each.detach() for name, each in wanted.items()}
    seen = set[str]()
    for name, tensor in live.items():
        path, dot, leaf = name.removeprefix("model.").removesuffix(".weight").rpartition(".")
        names = [name.removeprefix("model.")]
        if leaf in _PARTS:
            names = [f"{path}{dot}{part}.weight" for part in _PARTS[leaf]]
        elif leaf == "lm_head" and names[0] not in wanted:
            names = [_TIED]
        assert torch.equal(tensor, torch.cat([wanted[each] for each in names])), name
        seen.update(names)
    assert seen == wanted.keys()


def check_live_mtp(
    live: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    of: Family,
    packs: bool = True,
) -> None:
    """Compare an MTP layer's live memory, which vLLM fuses and packs, with a trainer's, tensor by tensor.

    No tensor may be left. `packs`: the engine is on a CPU, where it packs experts.
    """
    wanted = {name.removeprefix(of.layer): each for name, each in trained.items()}
    seen = set[str]()
    for name, tensor in live.items():
        inner = re.sub(r"^model\.(mtp_)?layers\.\d+\.(mtp_block\.)?|routed_experts\.", "", name)
        inner = inner.replace("experts.e_score", "gate.e_score")  # a second name
        found = next((each for each in _MTP_PARTS if each in inner), "")
        names = [inner.replace(found, part) for part in _MTP_PARTS[found]] if found else [inner]
        whole = torch.cat([wanted[each] for each in names])
        if packs and inner.endswith(_EXPERTS):
            whole = _packed_experts(whole)
        assert torch.equal(tensor, whole), name
        seen.update(names)
    assert seen == wanted.keys()


def _packed_experts(experts: torch.Tensor) -> torch.Tensor:
    """Return experts as vLLM's kernel for a CPU has them."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_prepack_moe_weight

    has_tiles = experts.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_tile")
    return cpu_prepack_moe_weight(experts, "amx" if has_tiles else "vec")


def check_version(rig: Rig, version: int) -> float:
    """Update, and compare greedy tokens with those of the target alone.

    Returns the part of the drafted tokens that the target accepted.
    """
    model, before = rig.models[(version - 1) % 2], rig.engine.draft_counts()
    rig.update(model, version)
    rollout = rig.generate(PROMPTS).result()
    assert rig.serves(model, PROMPTS, rollout.tokens)
    assert rollout.versions == [(version, version)] * len(PROMPTS)
    counts = rig.engine.draft_counts().since(before)
    assert counts.num_drafted > 0
    return counts.acceptance
