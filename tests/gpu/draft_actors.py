"""A trainer of a model and of a draft on one GPU, and engines that speculate with the draft."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu import sglang_probe, vllm_probe
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard


class DraftTrainer(TrainerShard):
    """One rank, in bfloat16. For equal seeds, its draft equals its model."""

    def start(self, path: str) -> None:
        """Read both from one checkpoint."""
        from transformers import AutoModelForCausalLM

        self.model, self.draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda() for _ in range(2)
        )

    @torch.no_grad()
    def train(self, part: str, seed: int) -> None:
        """Give the model, or the draft, other weights."""
        draw = torch.Generator(device="cuda").manual_seed(seed)
        for name, each in getattr(self, part).named_parameters():
            if "norm" not in name:
                scale = 0.02 if "embed" in name else 2 * each.shape[-1] ** -0.5
                each.copy_(torch.randn(each.shape, generator=draw, device="cuda") * scale)

    def weights(self, part: str) -> Mapping[str, torch.Tensor]:
        """Copy the weights of the model, or of the draft, to the host."""
        return {name: each.detach().cpu() for name, each in getattr(self, part).named_parameters()}


class VllmDrafts(EngineActor):
    """A vLLM with CUDA graphs, started with dummy weights. Its draft is a model of its own."""

    def __init__(self, path: str, name: str) -> None:
        speculative = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
        options = {**vllm_probe.OPTIONS, "speculative_config": speculative, "disable_log_stats": False}
        super().__init__("vllm", path, name, options)

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        before = await self._counted()
        await self.generate(prompts, {"max_tokens": num_tokens, "temperature": 0.0})
        drafted, accepted = (now - then for now, then in zip(await self._counted(), before, strict=True))
        return accepted / drafted

    async def _counted(self) -> tuple[int, int]:
        metrics = await asyncio.to_thread(self._engine.call, lambda engine: engine.get_metrics())
        values = {each.name: int(each.value) for each in metrics if hasattr(each, "value")}
        return values["vllm:spec_decode_num_draft_tokens"], values["vllm:spec_decode_num_accepted_tokens"]

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy what the draft's kernels read."""
        return (await asyncio.to_thread(self._engine.call, lambda llm: llm.collective_rpc(_live)))[0]


class SglangDrafts(EngineActor):
    """An SGLang with CUDA graphs, started with a dummy target. Its draft is a model of its own."""

    def __init__(self, path: str, name: str) -> None:
        speculative = {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": path,
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 3,
        }
        options = {**sglang_probe.OPTIONS, **speculative, "custom_weight_loader": [_LOADER]}
        super().__init__("sglang", path, name, options)

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        server = self._engine.loop.server
        asked = asyncio.run_coroutine_threadsafe(_accepted(server.manager, prompts, num_tokens), server.loop)
        return await asyncio.wrap_future(asked)

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy what the draft's kernels read."""
        return await asyncio.to_thread(self._live_draft)

    def _live_draft(self) -> Mapping[str, torch.Tensor]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        file = str(Path(tempfile.mkdtemp()) / "draft")
        blob = MultiprocessingSerializer.serialize([(file, torch.empty(0))])
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[blob], load_format=_LOADER, flush_cache=False
        )
        self._engine.loop.call(lambda server: server.manager.update_weights_from_tensor(request, None))
        return pickle.loads(Path(file).read_bytes())


_LOADER = "tests.gpu.draft_actors.dump"


def dump(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write a model's parameters to a file, unless it is there. SGLang calls it for the draft first."""
    file = Path(named_tensors[0][0])
    if not file.exists():
        held = {name: each.detach().cpu() for name, each in model.named_parameters()}
        file.write_bytes(pickle.dumps(held))


async def _accepted(manager: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    from sglang.srt.managers.io_struct import GenerateReqInput

    drafted = accepted = 0
    for prompt in prompts:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(input_ids=list(prompt), sampling_params=sampling)
        async for out in manager.generate_request(request, None):
            drafted += out["meta_info"]["spec_num_proposed_drafts"]
            accepted += out["meta_info"]["spec_num_correct_drafts"]
    return accepted / drafted


def _live(worker: Any) -> dict[str, torch.Tensor]:
    runner = worker.model_runner
    draft = runner.get_draft_model() if hasattr(runner, "get_draft_model") else runner.drafter.model
    return {name: each.detach().cpu().clone() for name, each in draft.named_parameters()}
