"""From a loader's trace to direct reads: what they write is what the loader would."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engines.test_loader_trace import Sharded, checkpoint, metas_of, unfused
from weightsync.engines.loading.loader_trace import trace
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.plan import Box, Layout, RankLayout, Reshard, Segment, TensorMeta

Weights = dict[str, torch.Tensor]


def shard(metas: list[TensorMeta], weights: Weights, rank: int, num_ranks: int) -> tuple[RankLayout, Weights]:
    """Rows of each tensor, as FSDP2 cuts them: the last ranks have fewer, or none."""
    segments, memory = [], {}
    for meta in metas:
        whole = weights[meta.name]
        parts = whole.reshape(1) if whole.dim() == 0 else whole
        step = -(-len(parts) // num_ranks)
        first = min(rank * step, len(parts))
        held = parts[first : first + step].clone()
        if not held.numel():
            continue
        memory[meta.name] = held
        box = Box((first, *(0,) * (whole.dim() - 1)), tuple(held.shape)) if whole.dim() else Box((), ())
        strides = tuple(stride * held.element_size() for stride in held.stride()) if whole.dim() else ()
        segments.append(Segment(meta.name, box, meta.name, 0, strides))
    return RankLayout(tuple(metas), tuple(segments)), memory


@pytest.mark.parametrize("num_trainers", [1, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_reads_what_its_loader_would_have_written(num_trainers: int, size: int) -> None:
    metas = metas_of()
    weights = checkpoint(metas)
    sides = [shard(metas, weights, rank, num_trainers) for rank in range(num_trainers)]
    traced = [trace(Sharded(rank, size), metas, ()) for rank in range(size)]
    engine = Layout.from_ranks([each.layout for each in traced])
    reshard = Reshard(Layout.from_ranks([layout for layout, _ in sides]), "e0", engine)
    sources = {(t, name): held for t, (_, memory) in enumerate(sides) for name, held in memory.items()}
    for rank, each in enumerate(traced):
        reads = reshard.reads(rank, [1] * num_trainers)
        live = {name: tensor.data for name, tensor in each.live.items()}
        copies = reads.copies(
            {key: held.data_ptr() for key, held in sources.items()},
            {name: tensor.data_ptr() for name, tensor in live.items()},
        )
        AddressCopies(copies, (0, len(copies)), [*sources.values(), *live.values()]).run(0)
        loaded = Sharded(rank, size)
        with torch.no_grad():
            loaded.load_weights(unfused(weights))
        for name, tensor in loaded.named_parameters():
            assert torch.equal(live[name], tensor), (rank, name)
