"""A real vLLM's slots for adapters of experts hold what vLLM itself puts there from PEFT's files.

On a CPU vLLM has the slots, and no kernel that reads them: tests/gpu has the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.contract.test_vllm_lora import assert_live
from tests.expert_adapters import STACKED, TARGETS, Slot, save_by_expert, slot_in
from tests.models import build_tiny_qwen3
from tests.patience import patient
from tests.rank_layouts import rank_layouts
from tests.unit.sources.test_lora import published
from weightsync.channel.feed import HolderFeed
from weightsync.channel.wire import Ready
from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.errors import ConfigError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Layout, Members, RankLayout, TensorMeta, make_plan
from weightsync.protocol.adapters import AdapterSpec
from weightsync.sources.lora.lora import LoraSource

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

RANK, MAX_RANK, ALPHA, BUCKET = 4, 8, 12, 12 << 10
TIMEOUT_S = patient(60)


def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world: int, options: Mapping[str, Any]
) -> VllmEngine:
    pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("vLLM runs on the GPU here")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    slots = {"enable_lora": True, "max_loras": 4, "max_lora_rank": MAX_RANK, "max_model_len": 64}
    return VllmEngine(str(folder), "e0", {"tensor_parallel_size": world, **slots, **options})


def adapted(folder: Path) -> nn.Module:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = {"target_modules": TARGETS, "target_parameters": STACKED}
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **targets)
    return peft.get_peft_model(base, config)


@torch.no_grad()
def train(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draw))


def slots_of(engine: VllmEngine, number: int) -> Sequence[Slot]:
    """Return each rank's slot."""
    return engine.call(lambda llm: llm.collective_rpc(slot_in, args=(number,)))


def slots_from_file(engine: VllmEngine, folder: Path, stacked: bool) -> Sequence[Slot]:
    """Have vLLM read an adapter from files, and return each rank's slot."""
    from vllm.lora.request import LoRARequest

    number = 7
    request = LoRARequest(str(folder), number, str(folder), is_3d_lora_weight=stacked)
    engine.call(lambda llm: llm.add_lora(request))
    slots = slots_of(engine, number)
    engine.call(lambda llm: llm.remove_lora(number))
    return slots


def assert_same(ours: Sequence[Slot], theirs: Sequence[Slot]) -> None:
    for rank, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            np.testing.assert_array_equal(found[name], each, err_msg=f"rank {rank}: {name}")


class Fed:
    """An adapter's slots in an engine, and the holder's end of their feeds: buckets in `memory`."""

    def __init__(self, adapter: AdapterEngine, source: RankLayout) -> None:
        self.adapter, layouts = adapter, rank_layouts(adapter)
        self.plan = make_plan(
            Layout.from_ranks([source]),
            {"e0": Layout.from_ranks(layouts)},
            Members(1 + len(layouts), (0,), (("e0", tuple(range(1, 1 + len(layouts)))),)),
            bucket_bytes=BUCKET,
            max_staging_bytes=8 << 20,
        )
        self.slots = tuple(SharedBuffer.create(BUCKET) for _ in range(self.plan.slots))
        handles = tuple(slot.handle for slot in self.slots)
        self.feeds = [HolderFeed(f"h{at}", "e0", handles, None, -1) for at in range(1, 1 + len(layouts))]
        self.threads, self.attempt = ThreadPoolExecutor(1), 0
        joined = self.threads.submit(adapter.attach, self.plan, [f.ticket for f in self.feeds], TIMEOUT_S)
        for feed in self.feeds:
            feed.accept(self.plan.digest(), TIMEOUT_S)
        joined.result(TIMEOUT_S)

    def update(self, tensors: Mapping[str, torch.Tensor], version: int) -> list[np.ndarray]:
        """Move a version as holders do. Returns each rank's digests."""
        self.attempt += 1
        self.adapter.pause("keep", TIMEOUT_S)
        loaded = self.threads.submit(self.adapter.load, self.attempt, TIMEOUT_S)
        for bucket in self.plan.buckets():
            slot = self.slots[bucket.index % len(self.slots)].tensor
            for piece in bucket.pieces:
                cut = tensors[self.plan.tensors[piece.tensor].name][piece.box.slices()].contiguous()
                slot[piece.offset : piece.offset + piece.nbytes] = cut.view(-1).view(torch.uint8)
            for feed in self.feeds:
                feed.send(Ready(self.attempt, bucket.index))
            for feed in self.feeds:
                feed.wait_done(self.attempt, bucket.index, TIMEOUT_S)
        found = [each.digests for each in loaded.result(TIMEOUT_S)]
        self.adapter.resume(version)
        return found

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()
        self.threads.shutdown()


def check_versions(engine: VllmEngine, model: nn.Module, folder: Path, kinds: Sequence[str]) -> None:
    """Each version's slots are those of vLLM's loader, whatever the slot held before."""
    spec = LoraSource(model, "default").spec("math")
    assert spec.rank == RANK
    source = LoraSource(model, "default")
    layout = source.layout()
    adapter = engine.open_adapter(spec)
    fed = Fed(adapter, layout)
    for version in range(1, 4):
        train(model, version)
        tensors = published(LoraSource(model, "default"))
        digests = fed.update(tensors, version)
        served = adapter.numbers[(version - 1) % 2]
        if len(digests) == 1:
            sent = [tensor_digest(tensors[meta.name], meta.shape) for meta in fed.plan.tensors]
            np.testing.assert_array_equal(digests[0], np.array(sent, dtype=np.uint64))
        for kind in kinds:
            where = folder / f"{kind}-{version}"
            if kind == "stacked":
                model.save_pretrained(str(where))
            else:
                save_by_expert(model, where, RANK)
            theirs = slots_from_file(engine, where, kind == "stacked")
            assert_same(slots_of(engine, served), theirs)
            written = (".w2_", ".w13_lora_b")
            assert all(
                slot[name].any() for slot in theirs for name in slot if any(kind in name for kind in written)
            )
    fed.close()
    engine.close_adapter("math")


def test_slots_of_experts_hold_what_vllm_reads_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = build_tiny_qwen3(tmp_path / "base", moe=True)
    model = adapted(tmp_path / "base")
    engine = started(tmp_path / "base", monkeypatch, 1, {"enable_mixed_moe_lora_format": True})
    try:
        with pytest.raises(
            ConfigError, match=r"kernel for adapters of model\.layers\.0\.mlp\.experts is not"
        ):
            engine.layout()
        check_versions(engine, model, tmp_path, ("stacked", "by_expert"))
        check_refusals(engine, LoraSource(model, "default").spec("math"))
        engine.call(lambda llm: assert_live(llm, base))
    finally:
        engine.close()


def check_refusals(engine: VllmEngine, spec: AdapterSpec) -> None:
    """vLLM itself stops at these with an assertion, or a stack of unequal tensors."""
    down = "model.layers.1.mlp.experts.3.down_proj"
    parts = [meta for meta in spec.tensors if not meta.name.startswith(down)]
    of_another = [TensorMeta(f"{down}.lora_A.weight", "float32", (2, 32))]
    of_another += [TensorMeta(f"{down}.lora_B.weight", "float32", (64, 2))]
    renamed = [replace(meta, name=meta.name.replace("down_proj", "w2")) for meta in spec.tensors]
    for tensors, why in (
        (parts, rf"target_modules: '{down}'.* adapt it, too"),
        (parts + of_another, rf"rank_pattern: 2.* give {down} rank 4"),
        (renamed, r"experts\.0\.w2'.* slots for model\.layers\.0\.mlp\.experts\.0\.gate_proj"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine.open_adapter(AdapterSpec.of("part", tensors)).layout()
    assert engine.call(lambda llm: llm.list_loras()) == set()


@pytest.mark.faults
@pytest.mark.parametrize("options", [{}, {"fully_sharded_loras": True}])
def test_slots_of_two_ranks_hold_what_vllm_reads_from_files(
    options: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny_qwen3(tmp_path / "base", moe=True)
    model = adapted(tmp_path / "base")
    engine = started(tmp_path / "base", monkeypatch, 2, options)
    try:
        check_versions(engine, model, tmp_path, ("by_expert",))
    finally:
        engine.close()
