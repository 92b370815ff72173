"""Fine-tunes a model, and measures what deltas between its versions cost, beside formats of others.

    python -m benchmarks.bench_deltas [--steps 50] [--rates 1e-6 1e-4] [--json FILE]
    python -m benchmarks.bench_deltas --gpu [--gib 8] [--json FILE]     how fast a GPU codes and applies

A Llama with random weights is trained first, so that its weights are no noise, then tuned by AdamW with
float32 masters at each rate. Every step publishes bfloat16 weights. Each format codes the same two versions,
in one thread:

  ours       `weightsync.deltas`, tiles of 65,536 elements
  ours+zstd  the same bytes by zstd at level 1, the values by byte planes
  slime      per tensor: places and values of changed bytes' elements as uint32 and bfloat16, zstd at level 1
  verl       per tensor: places as int32, values as bfloat16

slime and verl are their published formats, as data; their programs are not started. After each step the
decoded version is compared bit by bit. Rows with zstd need the package zstandard.

With --gpu, 1, 5 and 30 % of random bfloat16 change at random places. Rates are bytes of the whole version per
second, in memory

  of the GPU                the kernels alone: both versions and the delta are in the GPU's memory
  of the host, by the GPU   what holders with a GPU do: versions and delta in page-locked memory of the host
  of the host, by a thread  what other holders do
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import environment, print_table, write_json
from benchmarks.deltas_gpu import gpu_rows
from weightsync.deltas.changes import Changes, Span

__all__ = ["main"]

Bytes = npt.NDArray[np.uint8]
Code = Callable[[Sequence[Span], Bytes, Bytes], int]
Compress = Callable[[bytes], bytes]
VOCABULARY, LENGTH, BATCH = 8192, 128, 8
WARM_STEPS, WARM_RATE = 60, 1e-3


@dataclass
class Coder:
    """A format's bytes and seconds over all steps."""

    code: Code
    sizes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, spans: Sequence[Span], old: Bytes, new: Bytes) -> None:
        """Code one pair of versions."""
        start = time.perf_counter()
        nbytes = self.code(spans, old, new)
        self.seconds.append(time.perf_counter() - start)
        self.sizes.append(nbytes / len(new))


def main() -> None:
    """Parse arguments, tune, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-4])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gib", type=int, default=8, help="with --gpu: of a version, at least 2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.gpu:
        return show("deltas by a GPU", [*gpu_rows(args.gib)], args.json)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    for _ in steps(model, WARM_RATE, WARM_STEPS):
        pass
    warm = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows: list[dict[str, object]] = []
    for rate in args.rates:
        model.load_state_dict(warm)
        rows += tune(model, rate, args.steps)
    return show("deltas of a fine-tuned model", rows, args.json)


def show(title: str, rows: Sequence[Mapping[str, object]], file: Path | None) -> None:
    """Print the rows, and write them to `file`."""
    where = environment()
    print_table(title, rows, where)
    if file:
        write_json(file, "deltas", rows, where)


def steps(model: LlamaForCausalLM, rate: float, num: int) -> Iterator[float]:
    """Train `num` steps on sequences in which each token follows from the last. Yields losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(num):
        first = torch.randint(VOCABULARY, (BATCH, 1))
        tokens = (first * 31 + torch.arange(LENGTH) ** 2 * 7) % VOCABULARY
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def tune(model: LlamaForCausalLM, rate: float, num: int) -> list[dict[str, object]]:
    """Tune and code each step. Returns a row for each format."""
    spans, old = published(model)
    coders = {"ours": Coder(ours), "verl": Coder(verl)}
    if zstd := compressor():
        coders |= {"ours+zstd": Coder(with_zstd(zstd)), "slime": Coder(slime(zstd))}
    densities, apply_s, losses = [], [], []
    for loss in steps(model, rate, num):
        _, new = published(model)
        for coder in coders.values():
            coder.run(spans, old, new)
        densities.append(float((old.view(np.uint16) != new.view(np.uint16)).mean()))
        apply_s.append(applied(spans, old, new))
        losses.append(loss)
        old = new
    common = {
        "learning rate": rate,
        "MB": len(old) / 1e6,
        "changed %": spread([100 * each for each in densities]),
    }
    print(f"rate {rate}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    return [
        {
            **common,
            "system": name,
            "bytes %": spread([100 * each for each in coder.sizes]),
            "code GB/s": len(old) / 1e9 / statistics.median(coder.seconds),
            "apply GB/s": len(old) / 1e9 / statistics.median(apply_s) if name == "ours" else None,
        }
        for name, coder in coders.items()
    ]


def published(model: LlamaForCausalLM) -> tuple[list[Span], Bytes]:
    """Return all weights in bfloat16 as one run of bytes, and each tensor's place."""
    spans, parts, at = [], [], 0
    for tensor in model.state_dict().values():
        parts.append(tensor.detach().to(torch.bfloat16).view(torch.uint8).flatten())
        spans.append(Span(at, len(parts[-1]), 2))
        at += len(parts[-1])
    return spans, torch.cat(parts).numpy()


def applied(spans: Sequence[Span], old: Bytes, new: Bytes) -> float:
    """Return the seconds to decode and apply, after a comparison of all bits."""
    changes = Changes.between(spans, old, new)
    sent, memory = np.empty(changes.nbytes, np.uint8), old.copy()
    changes.write(sent)
    start = time.perf_counter()
    Changes.decode(spans, sent).apply(memory)
    seconds = time.perf_counter() - start
    assert (memory == new).all()
    return seconds


def ours(spans: Sequence[Span], old: Bytes, new: Bytes) -> int:
    """Code by `weightsync.deltas`."""
    return len(coded(spans, old, new))


def coded(spans: Sequence[Span], old: Bytes, new: Bytes) -> Bytes:
    """Return a delta as it is sent."""
    changes = Changes.between(spans, old, new)
    sent = np.empty(changes.nbytes, np.uint8)
    changes.write(sent)
    return sent


def with_zstd(zstd: Compress) -> Code:
    """Code by `weightsync.deltas`, then compress: the low bytes of all values, then the high bytes."""

    def code(spans: Sequence[Span], old: Bytes, new: Bytes) -> int:
        sent = coded(spans, old, new)
        num = int((old.view(np.uint16) != new.view(np.uint16)).sum())
        index, values = sent[: len(sent) - 2 * num], sent[len(sent) - 2 * num :]
        planes = np.ascontiguousarray(values.reshape(-1, 2).T)
        return sum(len(zstd(part.tobytes())) for part in (index, planes))

    return code


def slime(zstd: Compress) -> Code:
    """Code each tensor as a count, uint32 places and values, by zstd."""

    def code(spans: Sequence[Span], old: Bytes, new: Bytes) -> int:
        found = changed(spans, old, new)
        return sum(
            4 + len(zstd(places.astype(np.uint32).tobytes() + values.tobytes())) for places, values in found
        )

    return code


def verl(spans: Sequence[Span], old: Bytes, new: Bytes) -> int:
    """Code each tensor as a count, int32 places and values."""
    return sum(
        4 + len(places.astype(np.int32).tobytes() + values.tobytes())
        for places, values in changed(spans, old, new)
    )


def changed(spans: Sequence[Span], old: Bytes, new: Bytes) -> Iterator[tuple[Any, Any]]:
    """Yield places and new values of each tensor's changed elements."""
    for span in spans:
        its = slice(span.offset, span.offset + span.nbytes)
        before, after = old[its].view(np.uint16), new[its].view(np.uint16)
        places = np.flatnonzero(before != after)
        yield places, after[places]


def compressor() -> Compress | None:
    """Return zstd at level 1, None without the package."""
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        return None
    compress: Compress = zstandard.ZstdCompressor(level=1).compress
    return compress


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the greatest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    main()
