"""Where SGLang puts an adapter in its slots is found by loads of coordinates.

SGLang itself is not in it: `Pool` stacks and cuts adapters as its loader does, into a slot of its choice.
``tests/gpu/test_adapters_on_gpu.py`` runs it in SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from weightsync.engines.lora.adapter_places import passes
from weightsync.engines.lora.adapter_rank import Slot
from weightsync.engines.sglang.lora import LoraSlots, SlotOptions, coordinates, ones, peft_config
from weightsync.errors import ConfigError
from weightsync.memory.tensors import segment_view
from weightsync.plan import TensorMeta
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec

HIDDEN, HEADS, WIDE, SLOTS, LARGEST = 12, 8, 320, 5, 6
OUTPUTS = {"q_proj": HEADS, "k_proj": 4, "v_proj": 4, "down_proj": HIDDEN}
INPUTS = {"q_proj": HIDDEN, "k_proj": HIDDEN, "v_proj": HIDDEN, "down_proj": WIDE}


def spec_of(ranks: Mapping[str, int]) -> AdapterSpec:
    metas = []
    for name, rank in ranks.items():
        metas.append(TensorMeta(f"layers.0.{name}{LORA_A}", "float32", (rank, INPUTS[name])))
        metas.append(TensorMeta(f"layers.0.{name}{LORA_B}", "float32", (OUTPUTS[name], rank)))
    return AdapterSpec.of("math", metas)


class Layer(nn.Module):
    def __init__(self, suffix: str, parts: Sequence[str], inputs: int, outputs: int) -> None:
        super().__init__()
        a = torch.zeros(SLOTS, LARGEST * len(parts), inputs, dtype=torch.bfloat16)
        b = torch.zeros(SLOTS, outputs, LARGEST, dtype=torch.bfloat16)
        setattr(self, f"A_buffer{suffix}", a)
        setattr(self, f"B_buffer{suffix}", b)
        self.parts, self.stacks = parts, (a, b)


class Pool(nn.Module):
    """One of `size` tensor-parallel ranks: q, k and v are cut by rows, the down projection by columns."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        qkv = ("q_proj", "k_proj", "v_proj")
        self.qkv = Layer("_qkv", qkv, HIDDEN, sum(OUTPUTS[part] for part in qkv) // size)
        self.down = Layer("", ("down_proj",), WIDE // size, HIDDEN)

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill `slot` with an adapter, all of whose modules have one rank."""
        for layer in (self.qkv, self.down):
            a, b = layer.stacks
            row = 0
            for number, part in enumerate(layer.parts):
                prefix = f"base_model.model.layers.0.{part}"
                of_a, of_b = (tensors.get(prefix + kind) for kind in (LORA_A, LORA_B))
                rank = next(iter(tensors.values())).shape[0]
                rows = OUTPUTS[part] if part == "down_proj" else OUTPUTS[part] // self.size
                if of_a is not None and of_b is not None:
                    if part == "down_proj":
                        of_a = of_a.chunk(self.size, 1)[self.rank]
                    else:
                        of_b = of_b.chunk(self.size)[self.rank]
                    a[slot, number * rank : (number + 1) * rank] = of_a
                    b[slot, row : row + rows, :rank] = of_b
                row += rows

    def unload(self, slot: int) -> None:
        for layer in (self.qkv, self.down):
            for stack in layer.stacks:
                stack[slot].zero_()


def opened(pool: Pool, spec: AdapterSpec) -> Sequence[Slot]:
    """Do what the engine does."""
    slots = LoraSlots(pool)
    for number, (axis, base) in enumerate(passes(spec)):
        slots.look()
        pool.load(number % SLOTS, coordinates(spec, axis, base))
        slots.see(spec, axis, base)
        pool.unload(number % SLOTS)
    for number, slot in ((7, 3), (8, 1)):
        slots.look()
        pool.load(slot, ones(spec))
        slots.take(spec.name, number)
    return slots.reserve(spec, (7, 8))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize(
    "ranks",
    [
        {"q_proj": 4, "k_proj": 4, "v_proj": 4, "down_proj": 4},
        {"q_proj": 6, "v_proj": 2, "down_proj": 3},
        {"down_proj": 5},
    ],
)
def test_what_goes_by_the_layout_lies_where_the_loader_puts_it(
    rank: int, size: int, ranks: Mapping[str, int]
) -> None:
    spec, pool = spec_of(ranks), Pool(rank, size)
    first, second = opened(pool, spec)
    assert [first.number, second.number] == [7, 8]
    assert not any(bool(matrix.any()) for slot in (first, second) for matrix in slot.live.values())
    trained = {meta.name: torch.randn(meta.shape).bfloat16() for meta in spec.tensors}
    for segment in second.layout.segments:
        box = tuple(
            slice(low, low + size) for low, size in zip(segment.box.offset, segment.box.extent, strict=True)
        )
        segment_view(second.live[segment.buffer], segment).copy_(trained[segment.tensor][box])
    expected = Pool(rank, size)
    padded = {}
    for name, tensor in trained.items():
        shape = (spec.rank, tensor.shape[1]) if name.endswith(LORA_A) else (tensor.shape[0], spec.rank)
        padded[f"base_model.model.{name}"] = nn.functional.pad(
            tensor, (0, shape[1] - tensor.shape[1], 0, shape[0] - tensor.shape[0])
        )
    expected.load(1, padded)
    for layer, wanted in ((pool.qkv, expected.qkv), (pool.down, expected.down)):
        assert all(map(torch.equal, layer.stacks, wanted.stacks))
    assert {meta.name for meta in second.layout.tensors} == set(trained)
    assert {meta.dtype for meta in second.layout.tensors} == {"bfloat16"}


def test_a_slot_that_is_written_here_is_not_taken_for_the_new_one() -> None:
    spec, pool = spec_of({"down_proj": 4}), Pool(0, 1)
    slots = LoraSlots(pool)
    slots.look()
    pool.load(2, ones(spec))
    slots.take("math", 7)
    slots.look()
    pool.load(2, ones(spec))  # as an update of the adapter does
    pool.load(4, ones(spec))
    slots.take("math", 8)
    slots.look()
    pool.load(0, ones(spec))
    pool.load(1, ones(spec))
    with pytest.raises(ConfigError, match=r"adapter: 'math'.* filled 2 of its slots .*register it again"):
        slots.take("math", 9)


def test_an_adapter_that_is_rearranged_is_refused() -> None:
    class Swapped(Pool):
        def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
            super().load(slot, {name: each.flip(0) for name, each in tensors.items()})

    with pytest.raises(ConfigError, match=r"rearranges layers.0.down_proj.lora_.\.weight"):
        opened(Swapped(0, 1), spec_of({"down_proj": 4}))


def test_sglang_is_told_the_modules_and_a_scaling_of_one() -> None:
    config = peft_config(spec_of({"q_proj": 2, "down_proj": 4}))
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["r"] == config["lora_alpha"] == 4


@pytest.mark.parametrize(
    ("arguments", "num_adapters", "told"),
    [
        ({}, 0, "options.enable_lora: False"),
        ({"enable_lora": True, "enable_memory_saver": True}, 0, "options.enable_memory_saver: True"),
        ({"enable_lora": True, "max_loras_per_batch": 2}, 0, "options.max_loras_per_batch: 2 .*at least 3"),
        ({"enable_lora": True}, 3, "options.max_loras_per_batch: 8 .*at least 9"),
    ],
)
def test_an_engine_without_room_is_told_what_to_give(
    arguments: Mapping[str, object], num_adapters: int, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        SlotOptions.of(arguments.get).require(spec_of({"down_proj": 4}), num_adapters)
