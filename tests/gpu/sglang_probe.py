"""What an SGLang engine says to fixed prompts, in tokens and floats, wherever its weights came from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import torch

from tests.patience import patient

__all__ = ["OPTIONS", "Answers", "answers_of", "probe"]

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

Answers = list[Mapping[str, Any]]


async def probe(manager: Any) -> Answers:
    """Greedy tokens, and the log-probabilities of the likeliest at each place, as JSON would hold them.

    One prompt at a time: which requests share a batch would depend on when each of them comes.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    draw, answers = torch.Generator().manual_seed(0), []
    for number in range(6):
        prompt = torch.randint(3, 5000, (5 + 9 * number,), generator=draw).tolist()
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


def answers_of(engine: Any) -> Answers:
    """Of our adapter, from another thread than its own, while it serves."""
    server = engine.loop.server
    return asyncio.run_coroutine_threadsafe(probe(server.manager), server.loop).result(patient(120))


def _row(row: list[Any]) -> list[list[float]]:
    return sorted([token, logprob] for logprob, token, _ in row)
