"""Time to the first token: engines that load themselves against engines we fill.

    python -m benchmarks.bench_start [--kind vllm] [--engines 1] [--megabytes 400] [--rounds 1] [--json FILE]
    python -m benchmarks.bench_start --engines 4 --model qwen3-8b --rounds 3 --ways own dummy ours  on 4 GPUs

A Qwen3 with random weights is saved as safetensors files of up to 4 GB, once in `--folder` on a disk and once
in /dev/shm. A round starts a fleet from both places in all ways, in turn, with new processes:

- ``own``: the engine loads the weights itself.
- ``ours``: engines start with dummy weights while the files are read once; then all engines are filled.
- ``dummy``: only vLLM with dummy weights, which are never filled: no way can be quicker.

``total`` is the driver's time from the first actor's start until every engine has made a token, with Ray
already running. ``totals`` lists the totals of the rounds, in order. ``engines`` is the time until all
engines answer. ``read`` runs at the same time. ``connect`` includes the rest of reading; the phases of
connecting follow. ``fill`` is the whole update: pause, move, both sides' digests compared, commit.

Before a round from disk, files are written back and dropped from the kernel's cache. One warm-up start comes
before all rounds. Every engine's greedy token must be the same in both ways, or the run fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.cluster import gpu_uuids, kill, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.models import save_config
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.recipes.forecast.catalog import load
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors

__all__ = ["main"]

_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8]]
_FILE_NBYTES = 4 << 30
_POOL_NUMEL = (1 << 20) + 7  # random numbers, repeated: no two rows of a tensor are alike
_Row = dict[str, object]


class Own:
    """An engine without weightsync, which loads the checkpoint itself."""

    def __init__(self, kind: str, path: str, options: Mapping[str, Any]) -> None:
        own = _own_vllm if kind == "vllm" else _own_torch
        self._generate: Callable[[], list[int]] = own(path, options)

    def ready(self) -> None:
        """Return once the engine has loaded."""

    def first(self) -> list[int]:
        """Return one greedy token for each prompt."""
        return self._generate()


def _own_vllm(path: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 (a function without arguments)
    from weightsync.engines.vllm.api import set_environment

    set_environment()
    from vllm import LLM, SamplingParams

    llm = LLM(model=path, skip_tokenizer_init=True, disable_log_stats=True, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
    return lambda: [done.outputs[0].token_ids[0] for done in llm.generate(prompts, params, use_tqdm=False)]


def _own_torch(path: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options["dtype"]))
    model.to(options.get("device", "cpu"))
    ids = torch.tensor(_PROMPTS, device=model.device)

    @torch.no_grad()
    def first() -> list[int]:
        chosen: list[int] = model(ids).logits[:, -1].argmax(-1).tolist()
        return chosen

    return first


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="vllm", choices=["vllm", "torch"])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--model", help="a model of configs/models, in place of --megabytes")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs, both ways")
    parser.add_argument("--ways", nargs="+", default=["own", "ours"], choices=[*_WAYS])
    parser.add_argument("--places", nargs="+", default=["disk", "/dev/shm"], choices=["disk", "/dev/shm"])
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "dummy" in args.ways and args.kind != "vllm":
        parser.error("--ways dummy needs --kind vllm")
    where = environment(("torch", "ray", "numpy", "transformers", "vllm"))
    gpus = gpu_uuids()[: args.engines]
    start_ray(len(gpus))
    try:
        rows, nbytes = _measure(args, gpus)
    finally:
        ray.shutdown()
    print_table(f"first token of {args.engines} {args.kind} engines, {nbytes / 1e9:.3g} GB", rows, where)
    if args.json:
        write_json(args.json, "start", rows, where)


def _measure(args: argparse.Namespace, gpus: Sequence[str]) -> tuple[list[_Row], int]:
    shape = _shape(args, float32=not gpus)
    options: dict[str, Any] = {"dtype": shape.dtype}
    if args.kind == "vllm":
        # Our adapter is eager on a CPU by default, so the other way has to be, too.
        options |= {"max_model_len": 256, "enforce_eager": args.eager or not gpus}
    elif gpus:
        options["device"] = "cuda"
    rounds: dict[tuple[str, str], list[_Row]] = {}
    tokens: set[tuple[int, ...]] = set()
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        nbytes = _save(shape, Path(memory))
        if "disk" in args.places:
            shutil.copytree(memory, disk, dirs_exist_ok=True)
        everywhere = [*gpus, *[None] * args.engines][: args.engines]
        _WAYS[args.ways[0]](
            args, memory, options, everywhere
        )  # a warm-up: the first start also reads code from the disk
        for _ in range(args.rounds):
            for place, way in itertools.product(args.places, args.ways):
                folder = {"disk": disk, "/dev/shm": memory}[place]
                _drop(Path(folder))
                row, made = _WAYS[way](args, folder, options, everywhere)
                rounds.setdefault((place, way), []).append(row)
                tokens |= {tuple(each) for each in made if way != "dummy"}
                print(place, way, row, flush=True)
        assert len(tokens) <= 1, f"engines disagree: {tokens}"
    return [_row(place, way, its) for (place, way), its in rounds.items()], nbytes


def _own(
    args: argparse.Namespace, path: str, options: Mapping[str, Any], gpus: Sequence[str | None]
) -> tuple[_Row, list[list[int]]]:
    begun = time.perf_counter()
    engines = [_spawn(Own, args.kind, path, options, gpu=gpu) for gpu in gpus]
    ray.get([engine.ready.remote() for engine in engines])
    ready = time.perf_counter()
    made = ray.get([engine.first.remote() for engine in engines])
    ended = time.perf_counter()
    kill(engines)
    return {"engines s": ready - begun, "token s": ended - ready, "total s": ended - begun}, made


def _ours(
    args: argparse.Namespace, path: str, options: Mapping[str, Any], gpus: Sequence[str | None]
) -> tuple[_Row, list[list[int]]]:
    begun = time.perf_counter()
    engines = {
        f"e{i}": _spawn(EngineActor, args.kind, path, f"e{i}", options, gpu=gpu) for i, gpu in enumerate(gpus)
    }
    with WeightSync(SyncConfig(connect_timeout_s=1800)) as sync:
        sync.register_engines(engines)
        reading = sync.register_checkpoint("it", [path])
        ray.get([engine.info.remote() for engine in engines.values()])
        ready = time.perf_counter()
        sync.connect()
        connected = time.perf_counter()
        report = sync.update_weights(checkpoint="it")
        filled = time.perf_counter()
        sampling = {"max_tokens": 1, "temperature": 0}
        rollouts = ray.get([engine.generate.remote(_PROMPTS, sampling) for engine in engines.values()])
        ended = time.perf_counter()
        assert report.verified
    kill([*engines.values()])
    row: _Row = {
        "read s": reading.result().seconds,
        "engines s": ready - begun,
        "connect s": connected - ready,
        **{f"connect: {phase} s": seconds for phase, seconds in report.connect_phases.items()},
        "fill s": filled - connected,
        "move s": report.phases["move"],
        "token s": ended - filled,
        "total s": ended - begun,
    }
    return row, [[tokens[0] for tokens in rollout.tokens] for rollout in rollouts]


def _dummy(
    args: argparse.Namespace, path: str, options: Mapping[str, Any], gpus: Sequence[str | None]
) -> tuple[_Row, list[list[int]]]:
    return _own(args, path, {**options, "load_format": "dummy"}, gpus)


_WAYS = {"own": _own, "ours": _ours, "dummy": _dummy}


def _spawn(cls: type, *args: object, gpu: str | None) -> ActorHandle[Any]:
    return spawn(cls, *args, gpu=gpu, num_threads=8 if gpu else 1)


def _row(place: str, way: str, rounds: Sequence[_Row]) -> _Row:
    median = {key: statistics.median(float(str(row[key])) for row in rounds) for key in rounds[0]}
    totals = [float(str(row["total s"])) for row in rounds]
    spread = {
        "range": f"{min(totals):.1f}-{max(totals):.1f}",
        "totals s": [round(each, 2) for each in totals],
    }
    return {"from": place, "way": way, **median, **spread}


def _shape(args: argparse.Namespace, *, float32: bool) -> ModelShape:
    if args.model:
        return load(ModelShape, args.model, field="--model", kind="models")
    hidden, inter, dtype = 512, 2048, "float32" if float32 else "bfloat16"
    make = partial(
        ModelShape,
        hidden_size=hidden,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=inter,
        vocab_size=32000,
        tie_word_embeddings=True,
        qk_norm=True,
        dtype=dtype,
    )
    one, two = (sum(m.nbytes for m in checkpoint_tensors(make(num_hidden_layers=n))) for n in (1, 2))
    return make(num_hidden_layers=max(1, round((args.megabytes * 1e6 - one) / (two - one))))


def _save(shape: ModelShape, folder: Path) -> int:
    """Save a Qwen3 of `shape`, with the same random weights in every run.

    Returns the model's bytes.
    """
    from safetensors.torch import save_file

    save_config(shape, folder)
    pool = torch.randn(_POOL_NUMEL, generator=torch.Generator().manual_seed(0))
    held: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    filled = total = 0
    name = "model-0.safetensors"
    for meta in checkpoint_tensors(shape):
        if held and filled + meta.nbytes > _FILE_NBYTES:
            save_file(held, folder / name, metadata={"format": "pt"})
            held, filled, name = {}, 0, f"model-{len(index)}.safetensors"
        is_norm = "norm" in meta.name
        own = (pool.roll(len(index)) * (0.1 if is_norm else 0.02) + is_norm).to(getattr(torch, meta.dtype))
        held[meta.name] = own.repeat(-(-meta.numel // len(own)))[: meta.numel].view(meta.shape).clone()
        filled, total, index[meta.name] = filled + meta.nbytes, total + meta.nbytes, name
    save_file(held, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index, "metadata": {}}))
    return total


def _drop(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
