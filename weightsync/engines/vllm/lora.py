"""vLLM's slots for LoRA adapters, and what a request says of one.

vLLM keeps adapters in slots: tensors beside each layer, of the largest rank. Its loader copies an adapter
into a free slot, cut for tensor parallelism. Sources: vLLM's ``lora/`` of 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightsync.engines.adapter_rank import Slot
from weightsync.engines.vllm.api import lora_model, lora_request
from weightsync.errors import ConfigError
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.protocol.adapters import AdapterSpec

_DIGITS = 256
"""All whole numbers to 256 are exact in bfloat16."""
_STACK_DIMS = 4
"""Slots, 1, rows and columns."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """vLLM's settings of a request that an adapter answers, and its name of the adapter."""

    sampling: Any
    lora: Any


def adapted(name: str, version: int, number: int, sampling: object) -> Adapted:
    """Return settings of a request for slot `number`.

    vLLM caches prefixes by the request's name of the adapter. So the name has the version, and the slot's
    number, which is not used twice: an adapter that is registered again may start at version 1 again.
    """
    return Adapted(sampling, lora_request(f"{name}@{version} in {number}", number))


class LoraSlots:
    """The slots of one vLLM rank, see `weightsync.engines.adapter_rank.AdapterSlots`."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's, of either version
        self._runner = runner

    def reserve(self, spec: AdapterSpec, numbers: Sequence[int]) -> Sequence[Slot]:
        """Take a slot for each of `numbers`, and find where vLLM's loader puts the adapter's elements.

        The slots hold zeros then, and are pinned. Raises ConfigError if vLLM was not started with enough.
        """
        manager = self._manager()
        self._require_room(spec, manager, len(numbers))
        layout = _layout(spec, self._find(manager, spec, numbers[0]))
        slots = []
        for number in numbers:
            self._activate(manager, spec, number, lambda at: torch.zeros(spec.tensors[at].shape))
            manager.pin_adapter(number)
            slots.append(Slot(number, layout, dict(_stacks(manager, number))))
        return slots

    def release(self, numbers: Sequence[int]) -> None:
        """Empty the slots. vLLM may give them to other adapters."""
        manager = self._manager()
        for number in numbers:
            manager.remove_adapter(number)

    def _manager(self) -> Any:  # noqa: ANN401 - vLLM's
        worker = getattr(self._runner, "lora_manager", None)
        if worker is None:
            raise ConfigError("options.enable_lora", False, "start the engine with true to give it adapters")
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

    def _find(self, manager: Any, spec: AdapterSpec, number: int) -> tuple[Sequence[Segment], torch.dtype]:  # noqa: ANN401
        """Have vLLM load coordinates in place of an adapter, and see where each element came.

        A pass loads one digit of each element's tensor, row or column: no float type need hold more.
        """
        most = len(spec.tensors), *(max(meta.shape[axis] for meta in spec.tensors) for axis in range(2))
        found: list[dict[str, torch.Tensor]] = [{} for _ in most]
        live: dict[str, torch.Tensor] = {}
        for axis, size in enumerate(most):
            for digit in range(_num_digits(size)):
                base = _DIGITS**digit
                self._activate(manager, spec, number, partial(_digits, spec, axis, base))
                live = dict(_stacks(manager, number))
                for name, stack in live.items():
                    found[axis][name] = found[axis].get(name, -1) + stack.cpu().int() * base
                manager.remove_adapter(number)
        places = [
            _segment(spec, name, [each[name] for each in found], stack)
            for name, stack in live.items()
            if (found[0][name] >= 0).any()
        ]
        return places, next(iter(live.values())).dtype

    def _activate(
        self,
        manager: Any,  # noqa: ANN401 - vLLM's
        spec: AdapterSpec,
        number: int,
        value: Callable[[int], torch.Tensor],
    ) -> None:
        """Have vLLM load an adapter of `value(i)` for tensor i into a slot, by its own loader."""
        tensors = {f"base_model.model.{meta.name}": value(i) for i, meta in enumerate(spec.tensors)}
        manager.add_adapter(lora_model(manager, number, spec.rank, tensors))
        manager.activate_adapter(number)


def _stacks(manager: Any, number: int) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401 - vLLM's
    """Yield each layer's matrices in the slot of adapter `number`, by names of ours."""
    at = manager.lora_index_to_id.index(number)
    for path, module in manager.modules.items():
        for kind in ("lora_a_stacked", "lora_b_stacked"):
            for part, stack in enumerate(getattr(module, kind, ())):
                if stack.dim() == _STACK_DIMS:  # those of experts have more
                    yield f"{path}.{kind}.{part}", stack[at, 0]


def _num_digits(most: int) -> int:
    digits = 1
    while most >= _DIGITS**digits:
        digits += 1
    return digits


def _digits(spec: AdapterSpec, axis: int, base: int, index: int) -> torch.Tensor:
    """Return one digit of each element's coordinate in an adapter, counted from 1, in tensor `index`.

    Coordinates are the number of the tensor (axis 0), the row (1) and the column (2).
    """
    rows, columns = spec.tensors[index].shape
    counts = (torch.tensor([[index]]), torch.arange(rows)[:, None], torch.arange(columns)[None])
    return ((counts[axis] + 1) // base % _DIGITS).float().expand(rows, columns)


def _segment(spec: AdapterSpec, name: str, found: Sequence[torch.Tensor], live: torch.Tensor) -> Segment:
    """Return which box of which tensor is where in a stack, by the coordinates that were `found` there.

    Raises ConfigError if it is not one box in order.
    """
    rows, columns = torch.nonzero(found[0] >= 0, as_tuple=True)
    top, left = int(rows.min()), int(columns.min())
    extent = int(rows.max()) + 1 - top, int(columns.max()) + 1 - left
    held = [each[top : top + extent[0], left : left + extent[1]] for each in found]
    number, row, column = (int(each[0, 0]) for each in held)
    meta = spec.tensors[number]
    counted = torch.arange(extent[0])[:, None], torch.arange(extent[1])[None]
    expected = torch.tensor(number), row + counted[0], column + counted[1]
    if not all(bool((each == wanted).all()) for each, wanted in zip(held, expected, strict=True)):
        raise ConfigError("adapter", spec.name, f"vLLM rearranges {meta.name} in {name}: leave it out")
    strides = byte_strides(live)
    offset = top * strides[0] + left * strides[1]
    return Segment(meta.name, Box((row, column), extent), name, offset, strides)


def _layout(spec: AdapterSpec, found: tuple[Sequence[Segment], torch.dtype]) -> RankLayout:
    segments, dtype = found
    names = {segment.tensor for segment in segments}
    kind = str(dtype).removeprefix("torch.")
    held = tuple(TensorMeta(meta.name, kind, meta.shape) for meta in spec.tensors if meta.name in names)
    return RankLayout(held, tuple(segments))
