"""A real SGLang's slots for adapters of experts hold what SGLang itself puts there from PEFT's files.

Its model, its loaders and its manager of adapters run in a process of the test, without its kernels:
tests/gpu has the tokens.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.contract.test_vllm_expert_adapters import Fed
from tests.expert_adapters import STACKED, save_by_expert
from tests.forked import said_by
from tests.models import build_tiny_qwen3
from tests.unit.sources.test_lora import published
from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.engines.lora.adapter_places import passes
from weightsync.engines.rank.rank import Rank
from weightsync.engines.serving.engine_ranks import answers_of
from weightsync.engines.sglang.lora import LoraSlots, coordinates, ones, peft_config
from weightsync.engines.sglang.worker import RankSettings, SglangHost
from weightsync.memory.stacked_experts import as_loaded
from weightsync.protocol.adapters import AdapterSpec
from weightsync.sources.lora.lora import LoraSource

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

LAYERS, RANK, MAX_RANK, NUM_SLOTS, FACTOR = 2, 4, 8, 4, 3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
NUMBERS = (7, 8)
CPU = torch.device("cpu")


class Sglang:
    """A rank's model of a checkpoint, with dummy weights and slots for adapters of all layers."""

    def __init__(self, folder: Path, rank: int, num_ranks: int, num_parts: int) -> None:
        """The ranks have `num_parts` different parts of the experts."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.lora.lora_manager import LoRAManager
        from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        targets = [*TARGETS, "gate_proj", "up_proj", "down_proj"]
        shape = {"max_loras_per_batch": NUM_SLOTS, "max_lora_rank": MAX_RANK, "lora_target_modules": targets}
        without = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
        arguments = ServerArgs(
            str(folder),
            dtype="float32",
            load_format="dummy",
            enable_lora=True,
            tp_size=num_ranks,
            ep_size=num_parts,
            **shape,
            **without,
        )
        set_global_server_args_for_scheduler(arguments)
        init_distributed_environment(num_ranks, rank, f"file://{folder}/meeting", rank, backend="gloo")
        initialize_model_parallel(num_ranks, num_parts)
        config = ModelConfig.from_server_args(arguments)
        initialize_dp_attention(arguments, config)
        if not torch.cuda.is_available():
            _pin_nothing()
        self.model = Qwen3MoeForCausalLM(config.hf_config)
        self.manager = LoRAManager(
            base_model=self.model,
            base_hf_config=config.hf_config,
            max_loras_per_batch=NUM_SLOTS,
            load_config=LoadConfig(load_format="dummy"),
            dtype=torch.float32,
            server_args=arguments,
            lora_backend="torch_native",
            tp_size=num_ranks,
            tp_rank=rank,
            max_lora_rank=MAX_RANK,
            target_modules=arguments.lora_target_modules,
            lora_paths=[],
        )

    def fill(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load an adapter, and put it into a slot as a request of it does."""
        from sglang.srt.lora.lora_registry import LoRARef

        own = {key: each.clone() for key, each in tensors.items()}
        ref = LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=name.startswith("math"))
        outcome = self.manager.load_lora_adapter_from_tensors(ref, own, config)
        assert outcome.success, outcome.error_message
        self.manager.fetch_new_loras({name})

    def drop(self, name: str) -> None:
        """Unload an adapter."""
        self.manager.unload_lora_adapter(self.manager.lora_refs[name])

    def slot(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return all that an adapter's slot has, as it is multiplied."""
        pool, found = self.manager.memory_pool, {}
        at, scaling = pool.get_buffer_id(name), self.manager.loras[name].scaling
        for kind in ("A_buffer", "B_buffer"):
            for module, layers in getattr(pool, kind).items():
                later = kind == "B_buffer" and not module.endswith("_moe")  # B of experts has its scaling
                for number, stack in enumerate(layers):
                    found[f"{kind} {module} {number}"] = stack[at] * (scaling if later else 1)
        return found


def _pin_nothing() -> None:
    """Have SGLang's layers pin no memory, which a torch without CUDA cannot do."""
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **named: make(*args, **named)


@torch.no_grad()
def train(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))


def opened(engine: Sglang, rank: Rank, spec: AdapterSpec) -> AdapterEngine:
    """Stand in for SGLang's engine, whose scheduler fills a slot when a request comes."""

    def on_slots(method: str, *args: object) -> None:
        answers_of([rank.answer("call_slots", (method, args))])

    config = peft_config(spec)
    on_slots("require", spec)
    for axis, base in passes(spec):
        on_slots("look")
        engine.fill("probe", config, coordinates(spec, axis, base))
        on_slots("see", spec, axis, base)
        engine.drop("probe")
    for number in NUMBERS:
        on_slots("look")
        engine.fill(f"math@{number}", config, ones(spec))
        on_slots("take", "math", number)

    def on_ranks(method: str, *args: object) -> list[Any]:
        return answers_of([rank.answer("adapter", (spec, NUMBERS, method, args))])

    return AdapterEngine("e0", spec, NUMBERS, on_ranks)


def checked(pipe: Connection, folder: Path, number: int, num_ranks: int, num_parts: int) -> None:
    """Send how many of the adapter's tensors this rank has, once its slots have been compared."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Sglang(folder, number, num_ranks, num_parts)
    host = SglangHost(engine.model, CPU, RankSettings("e0", str(folder), "float32"))
    rank = Rank("sglang", 0, CPU, host, LoraSlots(engine.model))
    assert len(rank.layout().buffers), "the base is written where it lives"
    check_base(engine, host, base)
    stacks = {"target_modules": TARGETS, "target_parameters": STACKED}
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=FACTOR * RANK, **stacks))
    source = LoraSource(model, "default")
    adapter = opened(engine, rank, source.spec("math"))
    whole, (held,) = source.layout(), adapter.layout()
    names = {meta.name for meta in held.rank_layout().tensors}
    of_rank = tuple(meta for meta in whole.tensors if meta.name in names)
    segments = tuple(segment for segment in whole.segments if segment.tensor in names)
    fed = Fed(adapter, replace(whole, tensors=of_rank, segments=segments))
    for version in range(1, 4):
        train(model, version)
        fed.update(published(LoraSource(model, "default")), version)
        where = folder / f"rank{number}-v{version}"
        save_by_expert(model, where, RANK)
        config = json.loads((where / "adapter_config.json").read_text())
        engine.fill("file", config, load_file(where / "adapter_model.safetensors"))
        ours, theirs = engine.slot(f"math@{NUMBERS[(version - 1) % 2]}"), engine.slot("file")
        assert ours.keys() == theirs.keys()
        for name, wanted in theirs.items():
            torch.testing.assert_close(ours[name], wanted, rtol=0, atol=0, msg=name)
        assert all(each.any() for name, each in theirs.items() if name.split()[1].endswith("_moe"))
        engine.drop("file")
    fed.close()
    pipe.send((len(names), len(whole.tensors)))


@torch.no_grad()
def check_base(engine: Sglang, host: SglangHost, base: nn.Module) -> None:
    """SGLang's own loader passes over experts that have slots; ours brings them."""
    saved = dict(base.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in saved.items()}
    parts = [part for name, each in saved.items() for part in as_loaded(name, each, shapes)]
    experts = [layer.mlp.experts.base_layer for layer in engine.model.model.layers]
    for each in experts:
        each.w13_weight.fill_(7)
    engine.model.load_weights(parts)
    assert all(bool((each.w13_weight == 7).all()) for each in experts)
    host.load_weights(parts)
    for each, layer in zip(experts, base.model.layers, strict=True):
        first, count = each.moe_ep_rank * each.num_local_experts, each.num_local_experts
        gate_up = layer.mlp.experts.gate_up_proj[first : first + count]
        halves = (half.chunk(each.moe_tp_size, 1)[each.moe_tp_rank] for half in gate_up.chunk(2, 1))
        assert torch.equal(each.w13_weight, torch.cat([*halves], 1))
        down = layer.mlp.experts.down_proj[first : first + count]
        assert torch.equal(each.w2_weight, down.chunk(each.moe_tp_size, 2)[each.moe_tp_rank])


@pytest.mark.parametrize(
    ("num_ranks", "num_parts"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.faults), pytest.param(2, 2, marks=pytest.mark.faults)],
)
def test_slots_of_experts_hold_what_sglang_puts_there_from_files(
    num_ranks: int, num_parts: int, tmp_path: Path
) -> None:
    build_tiny_qwen3(tmp_path, moe=True)

    def of_rank(number: int) -> tuple[int, int]:
        return said_by(checked, tmp_path, number, num_ranks, num_parts)

    with ThreadPoolExecutor(num_ranks) as threads:
        for held, whole in threads.map(of_rank, range(num_ranks)):
            of_experts = whole - 2 * LAYERS * len(TARGETS)
            assert held == whole - of_experts + of_experts // num_parts
