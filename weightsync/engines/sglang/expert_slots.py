"""Checks which adapters of experts fit SGLang's slots, and prepares them for SGLang's loader.

A layer's slots have one matrix for each expert of the rank. Sources: ``FusedMoEWithLoRA`` in SGLang's
``lora/layers.py``, and ``lora/mem_pool.py`` and ``lora/lora.py``, of 0.5.17.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.protocol.adapters import LORA_A, AdapterSpec, is_of_expert

STACKS = ("gate_up_lora_a_weights", "gate_up_lora_b_weights", "down_lora_a_weights", "down_lora_b_weights")
"""SGLang's names of a layer's slots, each [slots, experts, rows, columns]."""

_OF_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<rest>.+)")
_PLAIN_METHOD, _PLAIN_RUNNER = "UnquantizedFusedMoEMethod", "triton"
_GATE, _UP = ".gate_proj.", ".up_proj."


def stacked(matrices: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return A or B of all experts of a layer as one tensor, under names such as ``….experts.gate_proj…``.

    SGLang's loader accepts these, too. Experts one by one would be tens of thousands of tensors, each with a
    file descriptor. Missing elements are zero: the rest of `rank`, experts without an adapter, and gate
    projections, without which SGLang would end at the up projections. Values have to be exact in bfloat16.
    """
    found = {name: _of_expert(name) for name in matrices}
    count = 1 + max((number for _, number in found.values()), default=-1)
    stacks: dict[str, torch.Tensor] = {}
    for name, matrix in matrices.items():
        together, number = found[name]
        rows, columns = matrix.shape
        shape = (rank, columns) if name.endswith(LORA_A) else (rows, rank)
        if together not in stacks:
            stacks[together] = torch.zeros(count, *shape, dtype=torch.bfloat16)
        stacks[together][number, :rows, :columns] = matrix
    gates = {name.replace(_UP, _GATE): torch.zeros_like(each) for name, each in stacks.items() if _UP in name}
    return gates | stacks


def _of_expert(name: str) -> tuple[str, int]:
    """Return the name that `stacked` gives an expert's tensor, and the expert's number."""
    found = _OF_EXPERT.fullmatch(name)
    assert found, "the caller tells experts from others"
    return f"{found['layer']}.{found['rest']}", int(found["number"])


def of_one_layer(spec: AdapterSpec) -> frozenset[str]:
    """Return the names of all tensors that are of experts of one layer, the first that has any."""
    layer, experts, _ = spec.first_of_experts.rpartition(".experts.")
    inside = f"{layer}{experts}"
    return frozenset(meta.name for meta in spec.tensors if inside and meta.name.startswith(inside))


def require_experts(model: torch.nn.Module, spec: AdapterSpec) -> None:
    """Raise ConfigError if this rank's slots do not take an adapter of experts, or SGLang would end at it."""
    found = spec.first_of_experts
    layers = {path: module for path, module in model.named_modules() if hasattr(module, STACKS[0])}
    if not layers:
        remedy = (
            f"leave {found} out, or start SGLang with gate_proj, up_proj and down_proj in "
            "lora_target_modules, and with a model of experts: it has no slots for any"
        )
        raise ConfigError("adapter", spec.name, remedy)
    last = max(_of_expert(meta.name)[1] for meta in spec.tensors if is_of_expert(meta.name))
    for path, module in layers.items():
        _require_plain(found, path, module)
        _require_places(found, path, module, last)


def _require_plain(found: str, path: str, module: Any) -> None:  # noqa: ANN401 - SGLang's
    """Raise ConfigError unless each expert has slots, and SGLang's kernels read these and nothing else."""
    if getattr(module, "experts_shared_outer_loras", False):
        remedy = f"give false: {found} is of one expert"
        raise ConfigError("options.experts_shared_outer_loras", True, remedy)
    if hasattr(module, "on_lora_slots_updated"):
        remedy = f"leave {found} out: {path} keeps copies of its slots, which updates do not write"
        raise ConfigError("model", type(module).__name__, remedy)
    method = type(getattr(module, "quant_method", None)).__name__
    if method != _PLAIN_METHOD:
        remedy = f"leave {found} out, or serve a model that is not quantised: {path} has other kernels"
        raise ConfigError("model", method, remedy)
    runner = getattr(getattr(module, "_lora_runner_backend", None), "value", None)
    if runner != _PLAIN_RUNNER:
        remedy = f"give 'triton' for {found}: other kernels have not been shown to read slots as they are"
        raise ConfigError("options.moe_runner_backend", runner, remedy)


def _require_places(found: str, path: str, module: Any, last: int) -> None:  # noqa: ANN401 - SGLang's
    """Raise ConfigError if a rank holds other experts than SGLang's loader of adapters takes it to hold."""
    base, count = module.base_layer, module.down_lora_a_weights.shape[1]
    if base.num_fused_shared_experts:
        remedy = f"give true: {path} has more experts than slots for {found}"
        raise ConfigError("options.disable_shared_experts_fusion", False, remedy)
    held = base.num_local_experts
    if count != held:
        remedy = f"leave it out: {path} has {held} experts, and slots of {count} for {found}"
        raise ConfigError("options.ep_num_redundant_experts", held - count, remedy)
    if last >= base.num_experts:
        remedy = f"adapt the model that SGLang serves: its {path} has {base.num_experts} experts"
        raise ConfigError("adapter", f"expert {last}", remedy)
