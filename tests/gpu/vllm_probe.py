"""What a vLLM engine says to fixed prompts, in tokens and floats, and the bytes that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tests import vllm_experts as experts_of
from tests.gpu.live_bytes import Live, all_hashes, hashes
from tests.gpu.same_answers import Answers, likeliest
from weightsync.engines.loading.kernel_state import tensors_beside
from weightsync.protocol.messages import Digests
from weightsync.quantising.stored_places import StoredPlaces

__all__ = ["OPTIONS", "beside", "flip", "held", "kernels", "live", "probe", "wrong_slots"]

# The same on both sides of a comparison, or kernels and batches would differ.
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 256 << 20,  # no measuring, which neighbours on the GPU disturb
}
NUM_TOKENS, TOP = 24, 5
_OF_IMAGES = 6  # tokens at the end of small vocabularies


def probe(llm: Any) -> Answers:
    """Greedy tokens, and the log-probabilities of the likeliest at each place, as JSON would hold them."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        logprobs=TOP,
        prompt_logprobs=TOP,
        ignore_eos=True,
        detokenize=False,
    )
    draw, top = torch.Generator().manual_seed(0), llm.model_config.get_vocab_size() - _OF_IMAGES
    for number in range(6):
        prompt = torch.randint(3, min(5000, top), (5 + 9 * number,), generator=draw).tolist()
        llm.add_request(f"probe-{number}", {"type": "token", "prompt_token_ids": prompt}, params)
    answers = {}
    while len(answers) < 6:
        for output in llm.step():
            if output.finished:
                (completion,) = output.outputs
                answers[output.request_id] = {
                    "tokens": list(completion.token_ids),
                    "logprobs": [_row(row) for row in completion.logprobs],
                    "prompt_logprobs": [_row(row) for row in output.prompt_logprobs[1:]],
                }
    return json.loads(json.dumps([answers[key] for key in sorted(answers)]))


def live(llm: Any) -> Live:
    """What the kernels read, in their layout."""
    return llm.collective_rpc(_live)


def held(llm: Any) -> Live:
    """All that each rank's modules hold, buffers and derived tensors included."""
    return llm.collective_rpc(_held)


def kernels(llm: Any) -> set[str]:
    """The kernels that layers of FP8 call, linear ones and experts, on all ranks."""
    return set().union(*llm.collective_rpc(_kernels))


def beside(llm: Any) -> list[list[str]]:
    """Tensors that each rank's kernels hold in place of live ones, such as old scales of experts."""
    return llm.collective_rpc(_beside)


def flip(llm: Any, leaf: str) -> None:
    """Flip a bit of the first parameter with this last name, before the next digest of live bytes."""
    llm.collective_rpc(_flip, args=(leaf,))


def wrong_slots(llm: Any, checkpoint: str) -> list[str]:
    """Slots of all ranks that do not have the bytes of the expert that vLLM's router sends there."""
    return [slot for rank in llm.collective_rpc(_wrong_slots, args=(checkpoint,)) for slot in rank]


def _wrong_slots(worker: Any, checkpoint: str) -> list[str]:
    (state,) = worker.model_runner.eplb_state.model_states.values()
    return experts_of.wrong_slots(worker.get_model(), state.physical_to_logical_map.tolist(), checkpoint)


def _flip(worker: Any, leaf: str) -> None:
    named, digests = worker.get_model().named_parameters(), StoredPlaces.digests
    held = next(each for name, each in named if name.endswith(leaf))
    storage = torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
    left = [held.storage_offset() * held.itemsize + 2]

    def flipped(places: StoredPlaces) -> Digests:
        if left:
            storage[left.pop()] ^= 1
        return digests(places)

    StoredPlaces.digests = flipped


def _live(worker: Any) -> Mapping[str, str]:
    return hashes(worker.get_model())


def _held(worker: Any) -> Mapping[str, str]:
    return all_hashes(worker.get_model())


def _kernels(worker: Any) -> set[str]:
    methods = [getattr(module, "quant_method", None) for module in worker.get_model().modules()]
    linear = {type(method.fp8_linear).__name__ for method in methods if hasattr(method, "fp8_linear")}
    return linear | {method.fp8_backend.name for method in methods if hasattr(method, "fp8_backend")}


def _beside(worker: Any) -> list[str]:
    return list(tensors_beside(worker.get_model()))


def _row(row: Mapping[int, Any]) -> list[list[float]]:
    return likeliest(((token, entry.logprob) for token, entry in row.items()), TOP)
