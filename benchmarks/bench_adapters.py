"""Updates a LoRA adapter of a real vLLM: in vLLM's slots, and by vLLM's own loader, in turns.

    python -m benchmarks.bench_adapters [--hidden 1024] [--layers 8] [--rank 32] [--rounds 9] [--json FILE]
    python -m benchmarks.bench_adapters --gpu --hidden 4096 --layers 36      a Qwen3-8B's adapter, on one GPU

One trainer has two PEFT adapters of the same shapes, on all linear layers of a Qwen3: in float32, or in
bfloat16 on a GPU that the trainer shares with vLLM and vLLM's CUDA graphs. ``ours`` is
`WeightSync.update_adapter`, from the call until requests get the new version; live slots are compared with
the trainer's digests. ``theirs`` is the way of frameworks: the trainer saves the adapter as PEFT does, in
``/dev/shm``, and vLLM's ``add_lora`` loads it in place; nothing is compared. vLLM serves no requests during a
round. The adapters change before a round, outside of both clocks. The first two rounds are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster import spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from weightsync import EngineActor, SyncConfig, TrainerShard, WeightSync

_WARM_ROUNDS = 2
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OURS, _THEIRS = "ours", "theirs"
_THEIR_NUMBER = 1
_ON_GPU = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5}


class Trainer(TrainerShard):
    """A model with two adapters, on one rank."""

    def __init__(self, path: str, rank: int) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.from_pretrained(path)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            base = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(_TARGETS))
        self.model: Any = get_peft_model(base, config, _OURS, autocast_adapter_dtype=False)
        self.model.add_adapter(_THEIRS, config)

    def change(self) -> None:
        """Draw new weights for both adapters."""
        import torch

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=0.01)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def save(self, folder: str) -> None:
        """Save one adapter as PEFT does."""
        self.model.save_pretrained(folder, selected_adapters=[_THEIRS])


class Engine(EngineActor):
    """A vLLM that also loads adapters from files."""

    async def load_adapter(self, folder: str) -> None:
        """Load an adapter in place, with vLLM's own loader."""
        import asyncio

        from vllm.lora.request import LoRARequest

        request = LoRARequest(_THEIRS, _THEIR_NUMBER, folder, load_inplace=True)
        engine: Any = self._engine
        await asyncio.to_thread(engine.call, lambda vllm: vllm.add_lora(request))


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", action="store_true", help="trainer and engine on the first GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment(("torch", "ray", "numpy", "vllm", "peft"))
    start_ray(1 if args.gpu else 0)
    try:
        row = _measure(args.hidden, args.layers, args.rank, args.rounds, "0" if args.gpu else None)
    finally:
        ray.shutdown()
    shown = {name: value for name, value in row.items() if not name.endswith("samples ms")}
    print_table(f"an adapter to a vLLM on the {'GPU' if args.gpu else 'CPU'}", [shown], where)
    if args.json:
        write_json(args.json, "adapters", [row], where)


def _measure(hidden: int, layers: int, rank: int, rounds: int, gpu: str | None) -> dict[str, object]:
    times: dict[str, list[float]] = {_OURS: [], _THEIRS: []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path, saved = f"{directory}/model", f"{directory}/adapter"
        _save_model(path, hidden, layers, gpu)
        trainer = spawn(Trainer, path, rank, gpu=gpu)
        options: dict[str, object] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": rank}
        options |= {"max_model_len": 64, **(_ON_GPU if gpu else {})}
        engine = spawn(Engine, "vllm", path, "e0", options, gpu=gpu)
        with WeightSync(SyncConfig()) as sync:
            sync.register_engines({"e0": engine})
            sync.register_checkpoint("base", [path])
            sync.connect()
            sync.update_weights(checkpoint="base")
            sync.register_adapter(_OURS, [trainer], adapter=_OURS)
            for _ in range(_WARM_ROUNDS + rounds):
                ray.get(trainer.change.remote())
                begun = time.perf_counter()
                report = sync.update_adapter(_OURS)
                times[_OURS].append(time.perf_counter() - begun)
                begun = time.perf_counter()
                ray.get(trainer.save.remote(saved))
                ray.get(engine.load_adapter.remote(f"{saved}/{_THEIRS}"))
                times[_THEIRS].append(time.perf_counter() - begun)
        for actor in (trainer, engine):
            ray.kill(actor)
    row: dict[str, object] = {"hidden": hidden, "layers": layers, "rank": rank, "MB": report.nbytes / 1e6}
    row |= {f"{phase} ms": seconds * 1e3 for phase, seconds in report.phases.items()}
    for name, seconds in times.items():
        kept = [second * 1e3 for second in seconds[_WARM_ROUNDS:]]
        row |= {f"{name} ms": statistics.median(kept), f"{name} range": f"{min(kept):.1f}-{max(kept):.1f}"}
        row[f"{name} samples ms"] = kept
    return row


def _save_model(path: str, hidden: int, layers: int, gpu: str | None) -> None:
    """Save a Qwen3 with random weights, made on the first GPU if there is a `gpu`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        vocab_size=4096,
        tie_word_embeddings=False,
        dtype="bfloat16" if gpu else "float32",
    )
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(path)


if __name__ == "__main__":
    main()
