"""Fine-tunes a model, and measures what deltas between its versions cost, beside formats of others.

    python -m benchmarks.bench_deltas [--steps 50] [--rates 1e-6 1e-4] [--json FILE]
    python -m benchmarks.bench_deltas --gpu [--gib 8] [--json FILE]     how fast a GPU codes and applies

A Llama with random weights is trained first, so that its weights are no noise, then tuned by AdamW with
float32 masters at each rate. Every step publishes bfloat16 weights. Each system codes what changed in one
thread, and applies it to its copy of the version before, which is then compared bit by bit:

  ours              `weightsync.deltas`, tiles of 65,536 elements
  ours, zstd        the same bytes by zstd at level 1, the values by byte planes; needs the package zstandard
  verl              verl's own classes, if verl can be imported, see `peer_deltas`
  slime, xor        slime's own classes, if slime can be imported
  slime, overwrite  the same with absolute values

Rates are by CPU seconds, which other work on the host changes little. Seconds of verl and slime include
checksums, and slime's include files in memory. Ours include neither: holders digest every version, whether it
came whole or not.

A further row for each learning rate has what ``deltas="auto"`` would gain at most, over all links, if it
decided for each group of tensors instead of each link (`delta_groups`).

With --gpu, 1, 5 and 30 % of random bfloat16 change at random places. Rates are bytes of the whole version per
second, in memory

  of the GPU                the kernels alone: both versions and the delta are in the GPU's memory
  of the host, by the GPU   what holders with a GPU do: versions and delta in page-locked memory of the host
  of the host, by a thread  what other holders do
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import environment, print_table, write_json
from benchmarks.delta_groups import Groups
from benchmarks.deltas_gpu import gpu_rows
from benchmarks.peer_deltas import Peer, Weights, peers
from weightsync.deltas.changes import Changes, Span, Table
from weightsync.deltas.tiles import TILE

__all__ = ["main"]

Bytes = npt.NDArray[np.uint8]
VOCABULARY, LENGTH, BATCH = 8192, 128, 8
WARM_STEPS, WARM_RATE = 60, 1e-3
_PACKAGES = ("numpy", "torch", "transformers", "zstandard", "verl", "slime")


@dataclass
class Coder:
    """A system's bytes and seconds over all steps."""

    system: Peer
    sizes: list[float] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)

    def run(self, new: Weights) -> None:
        """Bring the next version. Raises AssertionError if a bit differs."""
        began = time.process_time()
        nbytes = self.system.encode(new)
        made = time.process_time()
        self.system.decode()
        self.encode_s.append(made - began)
        self.decode_s.append(time.process_time() - made)
        self.sizes.append(nbytes / len(flat(new)))
        received = self.system.received()
        assert received.keys() == new.keys()
        assert all(torch.equal(bits(received[name]), bits(tensor)) for name, tensor in new.items())


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
    where = environment(_PACKAGES)
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
    """Tune, and bring each step's weights by each system. Returns a row for each system."""
    old = published(model.state_dict())
    systems: dict[str, Peer] = {"ours": Ours(old)}
    if importlib.util.find_spec("zstandard"):
        systems["ours, zstd"] = Compressed(old)
    systems |= {name: make(old) for name, make in peers().items()}
    coders = {name: Coder(system) for name, system in systems.items()}
    groups = Groups(dict(zip(old, spans(old), strict=True)))
    densities, losses = [], []
    for loss in steps(model, rate, num):
        new = published(model.state_dict())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for coder in coders.values():
            coder.run(new)
        groups.run(flat(old), flat(new))
        torch.set_num_threads(threads)
        densities.append(float((flat(old).view(np.uint16) != flat(new).view(np.uint16)).mean()))
        losses.append(loss)
        old = new
    for system in systems.values():
        system.close()
    common = {
        "learning rate": rate,
        "MB": len(flat(old)) / 1e6,
        "changed %": spread([100 * each for each in densities]),
    }
    print(f"rate {rate}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    rows: list[dict[str, object]] = [
        {
            **common,
            "system": name,
            "bytes %": spread([100 * each for each in coder.sizes]),
            "code GB/s": len(flat(old)) / 1e9 / statistics.median(coder.encode_s),
            "apply GB/s": len(flat(old)) / 1e9 / statistics.median(coder.decode_s),
        }
        for name, coder in coders.items()
    ]
    return [*rows, {**common, "system": "ours, by group", **groups.row()}]


def published(weights: Weights) -> Weights:
    """Copy weights in bfloat16, as parts of one memory in this order."""
    memory = torch.cat([tensor.detach().to(torch.bfloat16).flatten() for tensor in weights.values()])
    parts = torch.split(memory, [tensor.numel() for tensor in weights.values()])
    return {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


def flat(weights: Weights) -> Bytes:
    """Return the memory of `published` weights."""
    storage = next(iter(weights.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def spans(weights: Weights) -> list[Span]:
    """Return the places of weights in `flat`."""
    sizes = [tensor.nbytes for tensor in weights.values()]
    return [Span(end - size, size, 2) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 as integers."""
    return tensor.view(torch.int16)


class Ours:
    """`weightsync.deltas`, in one thread."""

    def __init__(self, first: Weights) -> None:
        self._spans = spans(first)
        self._old, self._live = flat(first), published(first)

    def encode(self, new: Weights) -> int:
        changes = Changes.between(self._spans, self._old, flat(new))
        self._sent = np.empty(changes.nbytes, np.uint8)
        changes.write(self._sent)
        self._old = flat(new)
        return len(self._sent)

    def decode(self) -> None:
        Changes.decode(self._spans, self._sent).apply(flat(self._live))

    def received(self) -> Weights:
        return self._live

    def close(self) -> None:
        """Close nothing: there are no files."""


class Compressed(Ours):
    """The same delta, compressed: the index, then the low bytes of all values, then the high bytes."""

    def encode(self, new: Weights) -> int:
        import zstandard

        super().encode(new)
        num_tiles = sum(-(-span.nbytes // 2 // TILE) for span in self._spans)
        num = 2 * int(Table.of(self._sent, num_tiles).counts.sum())
        index, values = self._sent[: len(self._sent) - num], self._sent[len(self._sent) - num :]
        planes = np.ascontiguousarray(values.reshape(-1, 2).T)
        compress = zstandard.ZstdCompressor(level=1).compress
        self._packed = [compress(part.tobytes()) for part in (index, planes)]
        return sum(map(len, self._packed))

    def decode(self) -> None:
        import zstandard

        expand = zstandard.ZstdDecompressor().decompress
        index, planes = (np.frombuffer(expand(part), np.uint8) for part in self._packed)
        self._sent = np.concatenate([index, planes.reshape(2, -1).T.ravel()])
        super().decode()


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the greatest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    main()
