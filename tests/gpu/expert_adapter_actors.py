"""A trainer with an adapter of experts on a GPU, and a vLLM whose slots and weights can be read."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.expert_adapters import Slot, kinds_of_slots, save_by_expert, slot_in
from tests.gpu.adapter_actors import FILE_NUMBER, AdapterTrainer, VllmAdapters

__all__ = ["ExpertAdapters", "ExpertTrainer"]


class ExpertTrainer(AdapterTrainer):
    """One rank, whose adapter has experts."""

    def save_by_expert(self, folder: str, rank: int) -> None:
        """Save the adapter as files that vLLM and SGLang read."""
        save_by_expert(self.model, Path(folder), rank)


class ExpertAdapters(VllmAdapters):
    """A vLLM without CUDA graphs, which starts in less time."""

    def __init__(self, path: str, name: str, num_ranks: int, max_rank: int, plugins: str = "") -> None:
        """`plugins` is a folder with plugins of vLLM."""
        sys.path += [plugins] if plugins else []
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers
        super().__init__(path, name, num_ranks, max_rank, enforce_eager=True)

    async def kinds_of_slots(self) -> set[str]:
        """Return the names of vLLM's classes for slots of experts."""
        found = await asyncio.to_thread(self._engine.call, lambda llm: llm.collective_rpc(kinds_of_slots))
        return set().union(*found)

    async def slots(self, version: int) -> Sequence[Slot]:
        """Return each rank's slot that has `version` of the only adapter."""

        def ask(llm: Any) -> Sequence[Slot]:
            numbers = sorted(number for number in llm.list_loras() if number != FILE_NUMBER)
            return llm.collective_rpc(slot_in, args=(numbers[(version - 1) % 2],))  # versions take turns

        return await asyncio.to_thread(self._engine.call, ask)

    async def slots_from_file(self, folder: str) -> Sequence[Slot]:
        """Return each rank's slot after vLLM's own loader has read an adapter from files."""

        def ask(llm: Any) -> Sequence[Slot]:
            from vllm.lora.request import LoRARequest

            llm.add_lora(LoRARequest(folder, FILE_NUMBER, folder, load_inplace=True))
            slots = llm.collective_rpc(slot_in, args=(FILE_NUMBER,))
            llm.remove_lora(FILE_NUMBER)
            return slots

        return await asyncio.to_thread(self._engine.call, ask)

    async def wrong_experts(self, checkpoint: str) -> list[str]:
        """Return the names of a checkpoint's weights of experts that vLLM does not have. For one rank."""
        return await asyncio.to_thread(
            self._engine.call, lambda llm: llm.collective_rpc(_wrong_experts, args=(checkpoint,))[0]
        )


def _wrong_experts(worker: Any, checkpoint: str) -> list[str]:
    from safetensors.torch import load_file

    saved = {
        name: each
        for name, each in load_file(Path(checkpoint) / "model.safetensors").items()
        if ".experts." in name
    }
    live = dict(worker.model_runner.get_model().named_parameters())
    wrong = []
    for name, each in saved.items():
        layer, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        leaf = "w2_weight" if projection == "down_proj" else "w13_weight"
        (stack,) = (
            value for path, value in live.items() if path.startswith(f"{layer}.") and path.endswith(leaf)
        )
        held = stack[int(expert)]
        if leaf == "w13_weight":
            held = held.chunk(2)[("gate_proj", "up_proj").index(projection)]
        if not torch.equal(held.cpu(), each):
            wrong.append(name)
    return wrong if saved else ["all"]
