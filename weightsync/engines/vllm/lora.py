"""vLLM's slots for LoRA adapters, and the settings of requests for an adapter.

vLLM keeps adapters in slots: tensors beside each layer, of the largest rank. vLLM's loader copies an adapter
into a free slot, cut for tensor parallelism. Sources: vLLM's ``lora/`` of 0.24 and 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.engines.lora.adapter_places import AdapterPlaces, digits, passes
from weightsync.engines.lora.adapter_rank import Slot
from weightsync.engines.vllm.api import lora_model, lora_request
from weightsync.engines.vllm.expert_slots import is_of_experts, require_experts
from weightsync.engines.vllm.expert_stacks import is_of_stack, stack, with_up_projections
from weightsync.errors import ConfigError, StateError
from weightsync.plan import RankLayout
from weightsync.protocol.adapters import AdapterSpec

_STACK_DIMS = 4
"""Slots, 1, rows and columns; of experts, slots, experts, rows and columns."""
_OF_LAYERS = ("lora_a_stacked", "lora_b_stacked")
_OF_EXPERTS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


@dataclass(frozen=True, slots=True)
class Adapted:
    """vLLM's settings of a request that an adapter answers, and vLLM's name of the adapter."""

    sampling: Any
    lora: Any


def adapted(name: str, version: int, number: int, sampling: object) -> Adapted:
    """Return settings of a request for slot `number`. vLLM caches prefixes by the request's adapter name."""
    return Adapted(sampling, lora_request(f"{name}@{version} in {number}", number))


def require_no_sleep(sleeps: bool) -> None:
    """Raise ConfigError for an engine that was started to sleep."""
    if sleeps:
        remedy = "leave it out: adapters would lose their slots in a sleep"
        raise ConfigError("options.enable_sleep_mode", True, remedy)


class LoraSlots:
    """The slots of one vLLM rank, see `weightsync.engines.lora.adapter_rank.AdapterSlots`."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's, of either version
        self._runner = runner

    def reserve(self, spec: AdapterSpec, numbers: Sequence[int]) -> Sequence[Slot]:
        """Reserve slots for `numbers`, and find where vLLM's loader puts the adapter's elements.

        The slots then hold zeros and are pinned. Raises ConfigError if vLLM was started with too few slots.
        """
        manager = self._manager()
        self._require_room(spec, manager, len(numbers))
        layout = self._find(manager, spec, numbers[0])
        slots, zero = [], torch.zeros(1, 1)
        for number in numbers:
            self._activate(manager, spec, number, [zero.expand(meta.shape) for meta in spec.tensors])
            manager.pin_adapter(number)
            slots.append(Slot(number, layout, dict(_stacks(manager, number))))
        return slots

    def require_held(self, number: int) -> None:
        """Raise StateError if vLLM has removed the adapter of a slot, which it then may give to others."""
        if number not in self._manager()._active_adapters.pinned_items:
            why = "others had vLLM remove adapters, or load one in its place"
            raise StateError(f"slot {number} is gone, since {why}: register the adapter again")

    def release(self, numbers: Sequence[int]) -> None:
        """Empty the slots. vLLM may give them to other adapters."""
        manager = self._manager()
        for number in numbers:
            manager.remove_adapter(number)

    def _manager(self) -> Any:  # noqa: ANN401 - vLLM's
        worker = getattr(self._runner, "lora_manager", None)
        if worker is None:
            raise ConfigError(
                "options.enable_lora", False, "start the engine with true, a server with --enable-lora"
            )
        return worker._adapter_manager

    def _require_room(self, spec: AdapterSpec, manager: Any, wanted: int) -> None:  # noqa: ANN401 - vLLM's
        config = manager.lora_config
        if spec.rank > config.max_lora_rank:
            raise ConfigError("options.max_lora_rank", config.max_lora_rank, f"give at least {spec.rank}")
        pinned = sum(number in manager._active_adapters.pinned_items for number in manager._active_adapters)
        for field, slots in (("max_loras", manager.lora_slots), ("max_cpu_loras", manager.capacity)):
            if slots - pinned < wanted:
                remedy = (
                    f"give at least {pinned + wanted}: each adapter needs {wanted} slots, one to serve and "
                    "one to write"
                )
                raise ConfigError(f"options.{field}", slots, remedy)

    def _find(self, manager: Any, spec: AdapterSpec, number: int) -> RankLayout:  # noqa: ANN401 - vLLM's
        """Have vLLM load coordinates in place of an adapter, and see where each element came."""
        places = AdapterPlaces(spec)
        for axis, base in passes(spec):
            self._activate(manager, spec, number, digits(spec, axis, base))
            places.add(axis, base, dict(_stacks(manager, number)))
            manager.remove_adapter(number)
        together = any(map(is_of_stack, manager.modules.values()))
        return with_up_projections(places.layout()) if together else places.layout()

    def _activate(
        self,
        manager: Any,  # noqa: ANN401 - vLLM's
        spec: AdapterSpec,
        number: int,
        values: Sequence[torch.Tensor],
    ) -> None:
        """Have vLLM's loader load an adapter with `values` for its tensors into a slot."""
        names = (f"base_model.model.{meta.name}" for meta in spec.tensors)
        model = lora_model(manager, number, spec.rank, dict(zip(names, values, strict=True)))
        require_experts(manager, model.loras, spec.shares_a)
        stack(manager, model.loras)
        manager.add_adapter(model)
        manager.activate_adapter(number)


def _stacks(manager: Any, number: int) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401 - vLLM's
    """Yield the layers' matrices in the slot of adapter `number`, by our names.

    The matrices of all experts of a layer are one stack. Only layers of the adapter are included, since
    matrices are large.
    """
    at = manager.lora_index_to_id.index(number)
    adapted_layers = manager.get_adapter(number).loras
    for path, module in manager.modules.items():
        if not is_of_experts(module):
            for kind in _OF_LAYERS:
                for part, stack in enumerate(getattr(module, kind, ())):
                    if stack.dim() == _STACK_DIMS:
                        yield f"{path}.{kind}.{part}", stack[at, 0]
        elif path in adapted_layers:
            for kind in _OF_EXPERTS:
                for part, stack in enumerate(getattr(module, kind)):
                    yield f"{path}.{kind}.{part}", stack[at]
