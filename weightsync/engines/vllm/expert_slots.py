"""Which adapters of experts vLLM's slots take."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from weightsync.engines.vllm.expert_stacks import is_of_stack, stacked_names
from weightsync.errors import ConfigError

_IN_TURNS = "GptOssForCausalLM"
"""Of this model vLLM's slots have a row of the gate projection, then one of the up projection."""


def is_of_experts(module: object) -> bool:
    """Return True if a layer of vLLM with slots has experts."""
    return hasattr(module, "w13_lora_a_stacked")


def require_experts(manager: Any, loras: Mapping[str, Any], shares_a: bool) -> None:  # noqa: ANN401
    """Raise ConfigError if vLLM would stop at an adapter of experts, or put it in wrong places.

    Args:
        manager: vLLM's ``LoRAModelManager``.
        loras: A and B of each module, by vLLM's names.
        shares_a: see `AdapterSpec`.
    """
    layers = {path: module for path, module in manager.modules.items() if is_of_experts(module)}
    within = _by_layer(loras, layers)
    for path, module in layers.items():
        if found := within.get(path):
            _require_slots(found[0], module, shares_a)
            _require_places(found[0], module)
            if is_of_stack(module):
                _require_all(stacked_names(path, module), found, loras, 3)
            else:
                names = manager.packed_modules.get(path, ())
                _require_all(names, found, loras, len(module.w13_lora_a_stacked) + 1)


def _by_layer(names: Iterable[str], layers: Container[str]) -> Mapping[str, Sequence[str]]:
    """Return the names that are within the layers, by layer."""
    within: dict[str, list[str]] = {}
    for name in names:
        path = name
        while (path := path.rpartition(".")[0]) and path not in layers:
            pass
        within.setdefault(path, []).append(name)
    return within


def _require_slots(found: str, module: Any, shares_a: bool) -> None:  # noqa: ANN401 - vLLM's
    """Raise ConfigError if the layer's slots have no place for each expert's projections."""
    if getattr(module, "enable_moe_shared_loras", False):
        remedy = f"leave it out: {found} is of one expert"
        raise ConfigError("options.enable_moe_shared_loras", True, remedy)
    if is_of_stack(module) and not shares_a:
        expert = found.rpartition(".")[0]
        remedy = (
            f"give true: gate_proj and up_proj of {expert} have an A each, and vLLM's slots for this model "
            "one for both"
        )
        raise ConfigError("options.enable_mixed_moe_lora_format", False, remedy)
    if is_of_stack(module) and module._base_model == _IN_TURNS:
        remedy = f"leave {found} out: vLLM's slots for this model have rows of gate_proj and up_proj in turns"
        raise ConfigError("model", _IN_TURNS, remedy)


def _require_places(found: str, module: Any) -> None:  # noqa: ANN401 - vLLM's
    """Raise ConfigError if a rank holds other experts than vLLM's loader of adapters takes it to hold."""
    if not module.use_ep:
        return
    routed, count = module.base_layer.routed_experts, module.local_num_experts
    if module.moe_config.moe_parallel_config.enable_eplb:
        remedy = f"leave it out: vLLM moves experts and not {found}, their adapter"
        raise ConfigError("options.enable_eplb", True, remedy)
    first, places = module.ep_rank * count, routed.expert_map
    if places is not None and places[first : first + count].tolist() != [*range(count)]:
        remedy = f"leave it out, or place experts in order, as many on each rank, for {found}"
        raise ConfigError("options.enable_expert_parallel", True, remedy)


def _require_all(
    names: Sequence[str], found: Sequence[str], loras: Mapping[str, Any], num_projections: int
) -> None:
    """Raise ConfigError if an expert of a layer has no adapter, or one of another rank.

    `names` has vLLM's of each expert's projections, in one order.
    """
    known = frozenset(names)
    if unknown := next((name for name in found if name not in known), None):
        raise ConfigError("target_modules", unknown, f"leave it out: vLLM has slots for {names[0]} and so on")
    if missing := next((name for name in names if name not in loras), None):
        remedy = "adapt it, too: vLLM takes all projections of a layer's experts, or none"
        raise ConfigError("target_modules", missing, remedy)
    for number in range(num_projections):
        first, *others = names[number::num_projections]
        rank = loras[first].lora_a.shape[0]
        for name in others:
            if (other := loras[name].lora_a.shape[0]) != rank:
                remedy = f"give {name} rank {rank}, as {first} has: vLLM has one for a projection"
                raise ConfigError("rank_pattern", other, remedy)
