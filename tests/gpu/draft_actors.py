"""Engines on a GPU that speculate with a draft, and say what they accept and what the draft holds."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.contract.sglang_hooks import call_loader
from tests.draft_pairs import NUM_SPECULATIVE_TOKENS, eagle_path, speculative_config
from tests.gpu import sglang_probe, vllm_probe
from weightsync.actors.engine import EngineActor


class VllmDrafts(EngineActor):
    """A vLLM with CUDA graphs, started with dummy weights, that speculates with a draft of a `method`."""

    def __init__(
        self, path: str, name: str, method: str, num_ranks: int, further: Mapping[str, Any] | None = None
    ) -> None:
        speculative = {"speculative_config": {**speculative_config(path, method), **(further or {})}}
        options = {**vllm_probe.OPTIONS, **speculative, "tensor_parallel_size": num_ranks}
        super().__init__("vllm", path, name, options)

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        before = await self.draft_counts()
        await self.generate(prompts, {"max_tokens": num_tokens, "temperature": 0.0})
        return (await self.draft_counts()).since(before).acceptance

    async def live_draft(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Copy what the draft's kernels read on each rank."""
        return await asyncio.to_thread(self._engine.call, lambda llm: llm.collective_rpc(_live))


class SglangDrafts(EngineActor):
    """An SGLang with CUDA graphs, started with a dummy target, that speculates with a draft of a `method`."""

    def __init__(
        self, path: str, name: str, method: str, num_ranks: int, options: Mapping[str, Any] | None = None
    ) -> None:
        num_tokens = NUM_SPECULATIVE_TOKENS[method]
        speculative = {
            **_named(path, method),
            "speculative_num_steps": num_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": num_tokens + 1,
            "tensor_parallel_size": num_ranks,
            "custom_weight_loader": [_LOADER],
        }
        super().__init__("sglang", path, name, {**(options or sglang_probe.OPTIONS), **speculative})

    async def share_accepted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Answer `prompts`. Returns the part of the drafted tokens that the model accepts."""
        server = self._engine.loop.server
        asked = asyncio.run_coroutine_threadsafe(_accepted(server.manager, prompts, num_tokens), server.loop)
        return await asyncio.wrap_future(asked)

    async def live_draft(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Copy what the draft's kernels read on the only rank."""
        return [await asyncio.to_thread(self._live_draft)]

    def _live_draft(self) -> Mapping[str, torch.Tensor]:
        file = str(Path(tempfile.mkdtemp()) / "draft")
        self._engine.loop.call(lambda server: call_loader(server.manager, _LOADER, [file], "draft"))
        return pickle.loads(Path(file).read_bytes())


def _named(path: str, method: str) -> Mapping[str, str]:
    if method == "mtp":  # the layer of MTP is in the model's files
        return {"speculative_algorithm": "NEXTN"}
    return {"speculative_algorithm": method.upper(), "speculative_draft_model_path": eagle_path(path)}


_LOADER = "tests.gpu.draft_actors.dump"


def dump(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write a model's parameters to a file, unless it is there: before 0.5.21, the draft comes first."""
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
    if hasattr(runner, "get_draft_model"):
        draft = runner.get_draft_model()
    else:  # before 0.32, each of two runners has its own name for it
        draft = getattr(runner, "drafter", getattr(runner, "speculator", None)).model
    theirs = {id(each) for each in runner.get_model().parameters()}  # a head that GLM's layer shares
    own = ((name, each) for name, each in draft.named_parameters() if id(each) not in theirs)
    return {name: each.detach().cpu().clone() for name, each in own}
