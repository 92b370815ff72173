"""Where SGLang puts an adapter of experts is found by loads of coordinates. Its base is loaded as without.

SGLang itself is not in it: `ExpertPool` stacks and cuts adapters of experts as its loader does, and `Served`
finds parameters by name as its models do. `test_sglang_expert_slots.py` runs it, where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.contract.test_sglang_lora import LARGEST, SLOTS, Pool, opened, spec_of
from tests.models import build_tiny_qwen3
from weightsync.engines.rank.rank import Rank
from weightsync.engines.sglang.lora import LoraSlots, SlotOptions, coordinates, ones, peft_config
from weightsync.engines.sglang.worker import RankSettings, SglangHost
from weightsync.errors import ConfigError
from weightsync.memory.tensors import segment_view
from weightsync.plan import TensorMeta
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec

LAYERS, EXPERTS, HIDDEN, WIDE = 2, 8, 10, 12
INPUTS = {"gate_proj": HIDDEN, "up_proj": HIDDEN, "down_proj": WIDE}
OUTPUTS = {"gate_proj": WIDE, "up_proj": WIDE, "down_proj": HIDDEN}
OF_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)(\.lora_[AB])\.weight")
OF_ALL = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\w+)(\.lora_[AB])\.weight")

Ranks = Mapping[tuple[int, int, str], int]
"""The rank of the adapter of a layer's expert's projection."""


class UnquantizedFusedMoEMethod:
    use_flashinfer_trtllm_moe = False


class Fp8MoEMethod: ...


class Experts(nn.Module):
    """The base layer."""

    def __init__(self, count: int = EXPERTS, local: int = EXPERTS, hidden: int = 1, wide: int = 1) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(local, 2 * wide, hidden), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(local, hidden, wide), requires_grad=False)
        self.quant_method = UnquantizedFusedMoEMethod()
        self.num_experts, self.num_local_experts, self.num_fused_shared_experts = count, local, 0


class FusedMoEWithLoRA(nn.Module):
    """As of SGLang 0.5.17: gate and up projections have A for each, as far apart as the largest rank."""

    def __init__(self, base: Experts, wide: int = WIDE) -> None:
        super().__init__()
        self.base_layer, self.quant_method = base, base.quant_method
        self.experts_shared_outer_loras = False
        self._lora_runner_backend = SimpleNamespace(value="triton")
        for name, rows, columns in (
            ("gate_up_lora_a_weights", 2 * LARGEST, HIDDEN),
            ("gate_up_lora_b_weights", 2 * wide, LARGEST),
            ("down_lora_a_weights", LARGEST, wide),
            ("down_lora_b_weights", HIDDEN, LARGEST),
        ):
            shape = (SLOTS, base.num_local_experts, rows, columns)
            setattr(self, name, torch.zeros(shape, dtype=torch.bfloat16))

    def stacks(self) -> list[torch.Tensor]:
        return [each for name, each in vars(self).items() if name.endswith("_weights")]

    def load(self, slot: int, expert: int, kind: str, parts: Mapping[str, torch.Tensor]) -> None:
        """Fill one expert's matrices; `parts` are of this rank, without those that the adapter has not."""
        wide = self.down_lora_a_weights.shape[-1]
        for name, part in parts.items():
            second = name == "up_proj"
            stem = "down" if name == "down_proj" else "gate_up"
            matrix = vars(self)[f"{stem}_lora_{kind}_weights"][slot, expert]
            if kind == "a":
                matrix[second * LARGEST : second * LARGEST + part.shape[0]] = part
            else:
                matrix[second * wide : second * wide + part.shape[0], : part.shape[1]] = part


class ExpertPool(Pool):
    """Rank `rank` of `size`, which cut each expert, or have other ones (`apart`)."""

    def __init__(self, rank: int, size: int, apart: bool) -> None:
        super().__init__(rank, size)
        self.cuts, self.first = (1 if apart else size), (rank * EXPERTS // size if apart else 0)
        local = EXPERTS // size if apart else EXPERTS
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.mlp = nn.Module()
            layer.mlp.experts = FusedMoEWithLoRA(Experts(local=local), WIDE // self.cuts)
            self.layers.append(layer)

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take experts one by one, as in PEFT's files, or those of a layer in one tensor."""
        super().load(slot, tensors)
        for stack in self.stacks():
            stack[slot].zero_()
        for name, tensor in tensors.items():
            if found := OF_EXPERT.search(name):
                self._load(slot, int(found[1]), int(found[2]), found[3], found[4], tensor)
            elif found := OF_ALL.search(name):
                gate = name.replace("up_proj", "gate_proj")
                assert tensors[gate].shape == tensor.shape or "down" in name  # SGLang looks for gates
                for expert, each in enumerate(tensor):
                    self._load(slot, int(found[1]), expert, found[2], found[3], each)

    def _load(self, slot: int, layer: int, expert: int, part: str, kind: str, tensor: torch.Tensor) -> None:
        module = self.layers[layer].mlp.experts
        at, which = expert - self.first, self.rank if self.cuts > 1 else 0
        if 0 <= at < module.base_layer.num_local_experts:
            if (part == "down_proj") == (kind == ".lora_A"):
                tensor = tensor.chunk(self.cuts, 1 if kind == ".lora_A" else 0)[which]
            module.load(slot, at, kind[-1].lower(), {part: tensor})

    def unload(self, slot: int) -> None:
        super().unload(slot)
        for stack in self.stacks():
            stack[slot].zero_()

    def stacks(self) -> list[torch.Tensor]:
        return [stack for layer in self.layers for stack in layer.mlp.experts.stacks()]


def spec_with(ranks: Ranks, others: Mapping[str, int]) -> AdapterSpec:
    metas = [*spec_of(others).tensors] if others else []
    for (layer, expert, part), rank in ranks.items():
        stem = f"layers.{layer}.mlp.experts.{expert}.{part}"
        metas.append(TensorMeta(stem + LORA_A, "float32", (rank, INPUTS[part])))
        metas.append(TensorMeta(stem + LORA_B, "float32", (OUTPUTS[part], rank)))
    return AdapterSpec.of("math", metas)


ALL = {(layer, e, part): 4 for layer in range(LAYERS) for e in range(EXPERTS) for part in INPUTS}
UNEQUAL = {place: 2 + place[1] % 3 + (place[2] == "down_proj") for place in ALL}
SOME = {(1, expert, part): 3 for expert in (1, 2, 7) for part in ("gate_proj", "down_proj")}
UP = {place: 2 for place in ALL if place[2] == "up_proj"}


@pytest.mark.parametrize(
    ("rank", "size", "apart"), [(0, 1, False), (0, 2, False), (1, 2, False), (0, 2, True), (1, 2, True)]
)
@pytest.mark.parametrize(
    ("ranks", "others"), [(ALL, {}), (UNEQUAL, {"q_proj": 5, "v_proj": 5, "down_proj": 3}), (SOME, {})]
)
def test_experts_lie_where_the_loader_puts_those_of_files(
    rank: int, size: int, apart: bool, ranks: Ranks, others: Mapping[str, int]
) -> None:
    spec, pool = spec_with(ranks, others), ExpertPool(rank, size, apart)
    LoraSlots(pool).require(spec)
    _, second = opened(pool, spec)
    assert not any(bool(matrix.any()) for matrix in second.live.values())
    trained = {meta.name: torch.randn(meta.shape).bfloat16() for meta in spec.tensors}
    for segment in second.layout.segments:
        view = segment_view(second.live[segment.buffer], segment)
        view.copy_(trained[segment.tensor][segment.box.slices()])
    expected, padded = ExpertPool(rank, size, apart), {}
    for name, tensor in trained.items():
        shape = (spec.rank, tensor.shape[1]) if name.endswith(LORA_A) else (tensor.shape[0], spec.rank)
        room = (0, shape[1] - tensor.shape[1], 0, shape[0] - tensor.shape[0])
        padded[f"base_model.model.{name}"] = nn.functional.pad(tensor, room)
    expected.load(1, padded)
    assert any(bool(stack.any()) for stack in expected.stacks())
    assert all(map(torch.equal, pool.stacks(), expected.stacks()))
    assert all(
        map(torch.equal, (*pool.qkv.stacks, *pool.down.stacks), (*expected.qkv.stacks, *expected.down.stacks))
    )
    here = {meta.name for meta in second.layout.tensors}
    mine = range(pool.first, pool.first + (EXPERTS // size if apart else EXPERTS))
    assert here == {name for name in trained if not (at := OF_EXPERT.search(name)) or int(at[2]) in mine}


def test_a_rank_whose_experts_have_no_adapter_is_refused() -> None:
    first = {place: rank for place, rank in ALL.items() if place[1] < EXPERTS // 2}
    with pytest.raises(ConfigError, match=r"adapter: 'math' .* a rank has slots for none of its .* experts"):
        opened(ExpertPool(1, 2, True), spec_with(first, {}))


def test_up_projections_alone_come_with_gates_of_zeros() -> None:
    spec, pool = spec_with(UP, {}), ExpertPool(0, 1, False)
    slot, _ = opened(pool, spec)
    assert {segment.tensor for segment in slot.layout.segments} == {meta.name for meta in spec.tensors}
    assert peft_config(spec)["target_modules"] == ["up_proj"]


def test_sglang_gets_few_tensors_and_keeps_those_of_one_layer() -> None:
    spec = spec_with(ALL, {"down_proj": 4})
    assert len(coordinates(spec, 1, 1)) == 2 + LAYERS * len(INPUTS) * 2
    kept = ones(spec)
    assert len(kept) == 2 + len(INPUTS) * 2
    assert kept["base_model.model.layers.0.mlp.experts.up_proj.lora_B.weight"].shape == (EXPERTS, WIDE, 4)


def test_gates_and_up_projections_in_turns_are_refused() -> None:
    """GPT-OSS has them so."""

    class Interleaved(ExpertPool):
        def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
            super().load(slot, tensors)
            for layer in self.layers:
                stack = layer.mlp.experts.gate_up_lora_b_weights[slot]
                stack.copy_(torch.stack(stack.chunk(2, 1), 2).flatten(1, 2))

    spec = spec_with(ALL, {})
    with pytest.raises(ConfigError, match=r"rearranges layers\.0\..*\.0\.gate_proj\.lora_B\.weight"):
        opened(Interleaved(0, 1, False), spec)


@pytest.mark.parametrize(
    ("attributes", "of_base", "told"),
    [
        (
            {"experts_shared_outer_loras": True},
            {},
            r"experts_shared_outer_loras: True .* give false",
        ),
        ({"on_lora_slots_updated": print}, {}, r"model: 'FusedMoEWithLoRA' .* keeps copies of its slots"),
        ({"quant_method": Fp8MoEMethod()}, {}, r"model: 'Fp8MoEMethod' .* not quantised"),
        (
            {"_lora_runner_backend": SimpleNamespace(value="experimental_sgl_trtllm")},
            {},
            r"options\.moe_runner_backend: 'experimental_sgl_trtllm' .* give 'triton'",
        ),
        ({"_lora_runner_backend": None}, {}, r"options\.moe_runner_backend: None"),
        ({}, {"num_fused_shared_experts": 1}, r"options\.disable_shared_experts_fusion: False .* give true"),
        ({}, {"num_local_experts": EXPERTS + 2}, r"options\.ep_num_redundant_experts: 2 .* leave it out"),
        ({}, {"num_experts": EXPERTS - 1}, r"adapter: 'expert 7' .*experts has 7 experts"),
    ],
)
def test_slots_that_updates_would_not_fill_are_refused(
    attributes: Mapping[str, object], of_base: Mapping[str, object], told: str
) -> None:
    pool, spec = ExpertPool(0, 1, False), spec_with(ALL, {"down_proj": 4})
    module = pool.layers[1].mlp.experts
    for holder, values in ((module, attributes), (module.base_layer, of_base)):
        for name, value in values.items():
            setattr(holder, name, value)
    slots = LoraSlots(pool)
    slots.require(spec_of({"down_proj": 4}))
    with pytest.raises(ConfigError, match=told):
        slots.require(spec)


def test_an_engine_without_slots_of_experts_is_told_the_option() -> None:
    found = f"layers.0.mlp.experts.0.gate_proj{LORA_A}"
    with pytest.raises(ConfigError, match=rf"adapter: 'math' .*leave {found} out, or .* lora_target_modules"):
        LoraSlots(Pool(0, 1)).require(spec_with(ALL, {}))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"init_expert_location": "experts.json"}, r"init_expert_location: 'experts\.json' .* leave it out"),
        ({"device": "cpu"}, r"options\.device: 'cpu' .* no kernel for adapters of experts"),
    ],
)
def test_options_with_which_experts_are_not_served_are_refused(more: Mapping[str, str], told: str) -> None:
    arguments = {"enable_lora": True, "max_loras_per_batch": 3}
    SlotOptions.of({**arguments, "device": "cuda"}.get).require(spec_with(ALL, {}), 0)
    options = SlotOptions.of({**arguments, **more}.get)
    options.require(spec_of({"down_proj": 4}), 0)
    with pytest.raises(ConfigError, match=told):
        options.require(spec_with(ALL, {}), 0)


class Served(nn.Module):
    """Passes over weights that have no parameter of their name, as SGLang's models do."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(path)
        for layer in self.inner.model.layers:
            count, doubled, hidden = layer.mlp.experts.gate_up_proj.shape
            base = Experts(count, count, hidden, doubled // 2)
            layer.mlp.experts = FusedMoEWithLoRA(base)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
            if found is None:
                parameters[f"inner.{name}"].copy_(weight)
                continue
            leaf = "w2_weight" if found[3] == "down" else "w13_weight"
            if (stack := parameters.get(f"inner.{found[1]}.{leaf}")) is not None:
                first = weight.shape[0] if found[3] == "up" else 0
                stack[int(found[2]), first : first + weight.shape[0]].copy_(weight)


def test_experts_of_the_base_are_loaded_beside_their_slots(tmp_path: Path) -> None:
    """Under the names that slots give them, SGLang's loader finds no experts."""
    build_tiny_qwen3(tmp_path, moe=True)
    model = Served(str(tmp_path))
    before = [name for name, _ in model.named_parameters()]
    device = torch.device("cpu")
    host = SglangHost(model, device, RankSettings("e0", str(tmp_path), "float32"))
    layout = Rank("sglang", 0, device, host, LoraSlots(model)).layout().rank_layout()
    held = {buffer.name for buffer in layout.buffers}
    assert {f"inner.model.layers.{n}.mlp.experts.base_layer.w13_weight" for n in range(2)} <= held
    host.load_weights(_experts(tmp_path))
    for number, layer in enumerate(AutoModelForCausalLM.from_pretrained(tmp_path).model.layers):
        base = model.inner.model.layers[number].mlp.experts.base_layer
        assert torch.equal(base.w13_weight, layer.mlp.experts.gate_up_proj)
        assert torch.equal(base.w2_weight, layer.mlp.experts.down_proj)
    assert [name for name, _ in model.named_parameters()] == before


def _experts(folder: Path) -> Sequence[tuple[str, torch.Tensor]]:
    """Return a model's experts, one by one."""
    found = []
    for number, layer in enumerate(AutoModelForCausalLM.from_pretrained(folder).model.layers):
        both, down = (layer.mlp.experts.gate_up_proj.detach(), layer.mlp.experts.down_proj.detach())
        for expert in range(len(down)):
            stem = f"model.layers.{number}.mlp.experts.{expert}"
            gate, up = both[expert].chunk(2)
            parts = {"gate": gate, "up": up, "down": down[expert]}
            found += [(f"{stem}.{part}_proj.weight", each) for part, each in parts.items()]
    return found
