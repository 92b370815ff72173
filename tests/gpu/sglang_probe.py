"""What an SGLang engine says to fixed prompts, in tokens and floats, and the bytes that it holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.contract.sglang_hooks import call_loader
from tests.gpu.live_bytes import Live, all_hashes, hashes
from tests.gpu.same_answers import Answers, likeliest
from tests.patience import patient

__all__ = [
    "LOADER",
    "OPTIONS",
    "SLOTS_LOADER",
    "answers_of",
    "held",
    "held_of",
    "label_of",
    "live",
    "live_of",
    "probe",
    "slots",
    "slots_of",
    "write_hashes",
    "write_slots",
]

LOADER = "tests.gpu.sglang_probe.write_hashes"
SLOTS_LOADER = "tests.gpu.sglang_probe.write_slots"
"""SGLang has no call into its ranks that returns something: these "loaders" of weights write files."""

# The same on both sides of a comparison, or kernels would differ.
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_radix_cache": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "cuda_graph_max_bs_decode": 2,
    "disable_prefill_cuda_graph": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,  # compiled on first use, for minutes
}
NUM_TOKENS, TOP = 24, 5


async def probe(manager: Any) -> Answers:
    """Greedy tokens, and the log-probabilities of the likeliest at each place, as JSON would hold them.

    One prompt at a time: which requests share a batch would depend on when each of them comes.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    draw, answers = torch.Generator().manual_seed(0), []
    for number in range(6):
        prompt = torch.randint(
            3, min(5000, manager.model_config.vocab_size), (5 + 9 * number,), generator=draw
        ).tolist()
        request = GenerateReqInput(
            input_ids=prompt,
            sampling_params={"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=TOP,
        )
        async for out in manager.generate_request(request, None):
            meta = out["meta_info"]
            answers.append(
                {
                    "tokens": list(out["output_ids"]),
                    "logprobs": [_row(row) for row in meta["output_top_logprobs"]],
                    "prompt_logprobs": [_row(row) for row in meta["input_top_logprobs"][1:]],
                }
            )
    return json.loads(json.dumps(answers))


async def live(manager: Any, num_ranks: int) -> Live:
    """What the kernels of each rank read, in their layout. The engine was started with `LOADER`."""
    return [each["parameters"] for each in await _written(manager, num_ranks, LOADER)]


async def held(manager: Any, num_ranks: int) -> Live:
    """All that each rank's modules hold, buffers and derived tensors included. Likewise."""
    return [each["all"] for each in await _written(manager, num_ranks, LOADER)]


async def slots(manager: Any, num_ranks: int) -> list[Mapping[str, Any]]:
    """Each rank's pid, and its slots for adapters as hashes. The engine was started with `SLOTS_LOADER`."""
    return await _written(manager, num_ranks, SLOTS_LOADER)


async def _written(manager: Any, num_ranks: int, loader: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        await call_loader(manager, loader, [f"{folder}/{rank}" for rank in range(num_ranks)])
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]


def write_hashes(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Run by SGLang in each rank's process: write hashes to the file that the only tensor is named for."""
    found = {"parameters": hashes(model), "all": all_hashes(model)}
    Path(named_tensors[0][0]).write_text(json.dumps(found))


def write_slots(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Run by SGLang likewise: write this process's id, and a hash of all matrices in each slot."""
    found: dict[int, Any] = defaultdict(hashlib.sha256)
    for _, module in model.named_modules():
        for name, stack in sorted(vars(module).items()):
            if name.startswith(("A_buffer", "B_buffer")) and isinstance(stack, torch.Tensor):
                for slot, matrix in enumerate(stack):
                    found[slot].update(matrix.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    held = sorted(each.hexdigest() for each in found.values())
    Path(named_tensors[0][0]).write_text(json.dumps({"pid": os.getpid(), "slots": held}))


def answers_of(engine: Any) -> Answers:
    """Of our adapter, from another thread than its own, while it serves."""
    server = engine.loop.server
    return asyncio.run_coroutine_threadsafe(probe(server.manager), server.loop).result(patient(120))


def live_of(engine: Any) -> Live:
    """Of our adapter, likewise."""
    server = engine.loop.server
    asked = asyncio.run_coroutine_threadsafe(live(server.manager, server.num_ranks), server.loop)
    return asked.result(patient(120))


def held_of(engine: Any) -> Live:
    """Of our adapter, likewise."""
    server = engine.loop.server
    asked = asyncio.run_coroutine_threadsafe(held(server.manager, server.num_ranks), server.loop)
    return asked.result(patient(120))


def slots_of(engine: Any) -> list[Mapping[str, Any]]:
    """Of our adapter, likewise."""
    server = engine.loop.server
    asked = asyncio.run_coroutine_threadsafe(slots(server.manager, server.num_ranks), server.loop)
    return asked.result(patient(120))


def label_of(engine: Any) -> str:
    """Of our adapter, likewise: the version that SGLang's own answers carry."""
    server = engine.loop.server
    return asyncio.run_coroutine_threadsafe(_label(server.manager), server.loop).result(patient(120))


async def _label(manager: Any) -> str:
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1})
    (out,) = [each async for each in manager.generate_request(request, None)]
    return str(out["meta_info"]["weight_version"])


def _row(row: list[Any]) -> list[list[float]]:
    return likeliest(((token, logprob) for logprob, token, _ in row), TOP)
