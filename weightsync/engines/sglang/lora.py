"""SGLang's slots for LoRA adapters, and the settings of requests for an adapter.

SGLang keeps slots beside each layer: tensors with one matrix per slot, of the largest rank. When a request
for an adapter runs, SGLang's scheduler gives the adapter a slot, and fills the slot by SGLang's own loader,
cut for tensor parallelism. No call reports the slot, so each rank looks for the changed slot. Sources:
SGLang's ``lora/`` of 0.5.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.engines.lora.adapter_places import AdapterPlaces, digits, passes
from weightsync.engines.lora.adapter_rank import Slot
from weightsync.engines.sglang import expert_slots
from weightsync.errors import ConfigError
from weightsync.protocol.adapters import LORA_A, AdapterSpec, is_of_expert

_BUFFERS = ("A_buffer", "B_buffer")
_SLOTS_BY_DEFAULT = 8
_SLOT_DIMS = 3
"""Slots, rows and columns. Slots of experts have one more dimension."""
_IN_ORDER = "trivial"


@dataclass(frozen=True, slots=True)
class Adapted:
    """SGLang's settings of a request that an adapter answers.

    Attributes:
        sampling: the sampling settings.
        lora: SGLang's name of the adapter.
        key: only requests with the same key share cached prefixes.
    """

    sampling: Mapping[str, Any]
    lora: str
    key: str


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """SGLang's options of adapters.

    Attributes:
        enabled: whether SGLang serves adapters.
        sleeps: whether SGLang's memory can be released.
        num_slots: how many adapters fit at once.
        expert_location: the first places of experts, "trivial" for in order.
        device: the device that SGLang runs on, "" if none was given.
    """

    enabled: bool
    sleeps: bool
    num_slots: int
    expert_location: str
    device: str

    @classmethod
    def of(cls, read: Callable[[str, Any], Any]) -> SlotOptions:
        """Read SGLang's arguments. `read`: returns an argument by name, or a default."""
        slots = read("max_loras_per_batch", _SLOTS_BY_DEFAULT)
        located, device = read("init_expert_location", _IN_ORDER), read("device", None) or ""
        is_on, sleeps = (bool(read(option, False)) for option in ("enable_lora", "enable_memory_saver"))
        return cls(is_on, sleeps, slots, located, device)

    def require(self, spec: AdapterSpec, num_adapters: int) -> None:
        """Raise ConfigError if there are no slots for an adapter beside `num_adapters` others."""
        if not self.enabled:
            raise ConfigError(
                "options.enable_lora", False, "start the engine with true, a server with --enable-lora"
            )
        if self.sleeps:
            remedy = "leave it out: adapters would lose their slots in a sleep"
            raise ConfigError("options.enable_memory_saver", True, remedy)
        if spec.first_of_experts:
            self._require_for_experts(spec.first_of_experts)
        least = 2 * (num_adapters + 1) + 1
        if self.num_slots < least:
            remedy = (
                f"give at least {least}: each adapter needs 2 slots, one to serve and one to write, and the "
                "model itself one"
            )
            raise ConfigError("options.max_loras_per_batch", self.num_slots, remedy)

    def _require_for_experts(self, name: str) -> None:
        """Raise ConfigError if SGLang cannot serve an adapter of experts, such as tensor `name` of it."""
        if self.device == "cpu":
            remedy = f"give {name} to an SGLang on a GPU: on a CPU there is no kernel for adapters of experts"
            raise ConfigError("options.device", self.device, remedy)
        if self.expert_location != _IN_ORDER:
            remedy = f"leave it out: SGLang moves experts, and not {name}, their adapter"
            raise ConfigError("options.init_expert_location", self.expert_location, remedy)


def slot_name(adapter: str, number: int) -> str:
    """Return SGLang's name for the adapter in slot `number`."""
    return f"{adapter}@{number}"


def peft_config(spec: AdapterSpec) -> dict[str, Any]:
    """Return the config of an adapter, in which all modules have the largest rank. Scaling is 1."""
    names = (meta.name for meta in spec.tensors if meta.name.endswith(LORA_A))
    modules = {name.removesuffix(LORA_A).rsplit(".", 1)[-1] for name in names}
    return {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.rank, "target_modules": sorted(modules)}


def coordinates(spec: AdapterSpec, axis: int, base: int) -> dict[str, torch.Tensor]:
    """Return `digits` in place of an adapter's tensors, by PEFT's names, padded to the largest rank."""
    names = [meta.name for meta in spec.tensors]
    return _for_loader(dict(zip(names, digits(spec, axis, base), strict=True)), spec.rank)


def ones(spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Return ones in place of an adapter's tensors, by PEFT's names.

    SGLang keeps these tensors in host memory as long as the slot, so only one layer's experts are included.
    """
    kept = expert_slots.of_one_layer(spec)
    metas = (meta for meta in spec.tensors if meta.name in kept or not is_of_expert(meta.name))
    return _for_loader({meta.name: torch.ones(meta.shape) for meta in metas}, spec.rank)


def _for_loader(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return them by PEFT's names, padded to one rank for all modules, experts in stacks."""
    of_experts = {name: each for name, each in tensors.items() if is_of_expert(name)}
    given = {name: _padded(each, name, rank) for name, each in tensors.items() if name not in of_experts}
    given |= expert_slots.stacked(of_experts, rank)
    return {f"base_model.model.{name}": each for name, each in given.items()}


def _padded(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """Pad A's rows, or B's columns, with zeros: SGLang has one rank for all modules of an adapter."""
    shape = (rank, tensor.shape[1]) if name.endswith(LORA_A) else (tensor.shape[0], rank)
    padded = tensor.new_zeros(shape)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    return padded


class LoraSlots:
    """The slots of one SGLang rank, see `weightsync.engines.lora.adapter_rank.AdapterSlots`.

    The engine calls `require`, and then for each load `look`, has SGLang load an adapter and run a request
    of it, and calls `see` or `take`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sums = torch.empty(0)
        self._places: dict[str, AdapterPlaces] = {}
        self._taken: dict[int, int] = {}

    def require(self, spec: AdapterSpec) -> None:
        """Raise ConfigError if SGLang has no slots for the experts of an adapter, or would end at them."""
        if spec.first_of_experts:
            expert_slots.require_experts(self._model, spec)

    def look(self) -> None:
        """Store the content of all slots."""
        self._sums = self._now()

    def see(self, spec: AdapterSpec, axis: int, base: int) -> None:
        """Add the content of the slot that changed since `look`, by `AdapterPlaces.add`."""
        if (axis, base) == next(passes(spec)):
            self._places[spec.name] = AdapterPlaces(spec)
        self._places[spec.name].add(axis, base, self._filled(self._changed(spec.name)))

    def take(self, adapter: str, number: int) -> None:
        """Zero the slot that changed since `look`, and keep it as `number`."""
        at = self._changed(adapter)
        for matrix in self._at(at).values():
            matrix.zero_()
        self._taken[number] = at

    def reserve(self, spec: AdapterSpec, numbers: Sequence[int]) -> Sequence[Slot]:
        """Return the slots, which were taken. Raises ConfigError if SGLang rearranges the adapter."""
        layout = self._places.pop(spec.name).layout()
        return [Slot(number, layout, self._at(self._taken[number])) for number in numbers]

    def require_held(self, number: int) -> None:
        """Require nothing: SGLang unloads a slot's adapter by the slot's own name only."""

    def release(self, numbers: Sequence[int]) -> None:
        """Forget the slots, before SGLang unloads their adapters."""
        for number in numbers:
            self._taken.pop(number, None)

    def _changed(self, adapter: str) -> int:
        """Return the slot that changed since `look`, of those that nobody here writes."""
        differ = (self._now() != self._sums).any(dim=0).tolist()
        changed = {slot for slot, is_other in enumerate(differ) if is_other} - set(self._taken.values())
        if not changed:
            remedy = "a rank has slots for none of its modules, or experts: adapt one of those that it has"
            raise ConfigError("adapter", adapter, remedy)
        if len(changed) != 1:
            remedy = f"SGLang filled {len(changed)} of its slots in place of one: register it again"
            raise ConfigError("adapter", adapter, remedy)
        return changed.pop()

    def _now(self) -> torch.Tensor:
        """Return a sum over the bytes of each matrix, int64[matrices, slots]."""
        held = self._stacks().values()
        return torch.stack([each.view(torch.uint8).flatten(1).sum(1, dtype=torch.int64) for each in held])

    def _filled(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the matrices of a slot, of experts only where the adapter has any: they are large."""
        held = self._at(slot)
        return {name: each for name, each in held.items() if each.dim() < _SLOT_DIMS or each.any()}

    def _at(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: stack[slot] for name, stack in self._stacks().items()}

    def _stacks(self) -> dict[str, torch.Tensor]:
        """Return the matrices of all slots by layer, [slots, rows, columns] or [slots, experts, …]."""
        stacks: dict[str, torch.Tensor] = {}
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                is_buffer = name.startswith(_BUFFERS) and value.dim() == _SLOT_DIMS
                if is_buffer or name in expert_slots.STACKS:
                    stacks[f"{path}.{name}"] = value
        return stacks
