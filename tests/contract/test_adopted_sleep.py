"""A real vLLM that somebody else started falls asleep while its weights are nobody's version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import build_tiny_qwen3
from tests.patience import patient
from tests.vllm_imports import import_vllm
from weightsync.engines.vllm.adopted import AdoptedVllm

CYCLES, NUM_TOKENS = 20, 50


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Any]:
    """On CPUs no memory sleeps, and vLLM refuses the option. vLLM's core and executor behave as on GPUs."""
    import_vllm()
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    build_tiny_qwen3(tmp_path)
    options = AsyncEngineArgs(
        str(tmp_path),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 26,
        distributed_executor_backend="uni",
        worker_extension_cls="weightsync.WeightSyncWorker",
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Any:
        return AsyncLLMEngine.from_engine_args(options)

    made = asyncio.run_coroutine_threadsafe(start(), loop).result(patient(60))
    made.vllm_config.model_config.enable_sleep_mode = True
    made.loop = loop
    yield made
    loop.call_soon_threadsafe(made.shutdown)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.faults
def test_a_frozen_request_gets_no_token_when_it_falls_asleep_half_awake(llm: Any) -> None:
    from vllm import SamplingParams

    engine, loop, tokens = AdoptedVllm(llm, llm.loop), llm.loop, list[int]()
    asyncio.run_coroutine_threadsafe(engine.hold(), loop).result(patient(10))

    async def ask() -> None:
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        async for output in llm.generate({"prompt_token_ids": [1, 2, 3]}, sampling, "asked"):
            tokens[:] = output.outputs[0].token_ids

    asked = asyncio.run_coroutine_threadsafe(ask(), loop)
    for _ in range(CYCLES):
        engine.sleep(2, "keep", patient(10))
        engine.pause("keep", patient(10))  # wakes the weights, which are zeros now
    assert tokens == []
    asyncio.run_coroutine_threadsafe(llm.wake_up(["kv_cache"]), loop).result(patient(10))
    asked.result(patient(30))
    assert len(tokens) == NUM_TOKENS
