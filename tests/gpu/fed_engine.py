"""An engine that is fed from one process which holds all weights: every rank's slots on its own GPU.

Without a GPU, slots are in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.contract.conftest import source_layout
from tests.patience import patient
from tests.rank_layouts import rank_layouts
from weightsync.channel.feed import HolderFeed
from weightsync.channel.wire import Ready
from weightsync.engines import make_engine
from weightsync.engines.loading.whole_sink import synchronize
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.file_names import FileNames
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import device_id, named_tensors
from weightsync.plan import Layout, Members, RankLayout, make_plan
from weightsync.protocol.messages import Digests

__all__ = ["FedEngine"]

TIMEOUT_S = patient(60)
BUCKET_BYTES = 1 << 20  # smaller than the embedding, larger than a layer's norms


class FedEngine:
    """One engine with dummy weights and CUDA graphs, and a holder for each of its ranks."""

    def __init__(self, kind: str, model_path: str, num_ranks: int, options: Mapping[str, Any]) -> None:
        self.engine: Any = make_engine(kind, model_path, "e0", {"tensor_parallel_size": num_ranks, **options})
        self.num_ranks, self.version = num_ranks, 0
        self.threads = ThreadPoolExecutor(2)
        self.layouts: list[RankLayout] = []
        self.feeds: list[HolderFeed] = []
        self.slots: list[list[DeviceBuffer | SharedBuffer]] = []

    def connect(self, model: PreTrainedModel) -> None:
        """A new epoch, with the layout that the engine has now."""
        self._disconnect()
        self.layouts = rank_layouts(self.engine)
        ranks = range(1, self.num_ranks + 1)
        self.plan = make_plan(
            Layout.from_ranks([source_layout(*in_files(model))]),
            {"e0": Layout.from_ranks(self.layouts)},
            Members(self.num_ranks + 1, (0,), (("e0", tuple(ranks)),)),
            bucket_bytes=BUCKET_BYTES,
            max_staging_bytes=8 << 20,
        )
        for rank, layout in zip(ranks, self.layouts, strict=True):
            self.slots.append([_slot(layout.device) for _ in range(self.plan.slots)])
            handles = tuple(slot.handle for slot in self.slots[-1])
            self.feeds.append(HolderFeed(f"h{rank}", "e0", handles, None, -1))
        tickets = [feed.ticket for feed in self.feeds]
        joined = self.threads.submit(self.engine.attach, self.plan, tickets, TIMEOUT_S)
        for feed in self.feeds:
            feed.accept(self.plan.digest(), TIMEOUT_S)
        assert {each.plan_digest for each in joined.result(TIMEOUT_S)} == {self.plan.digest()}

    def update(self, model: PreTrainedModel) -> list[Digests]:
        """Make a whole update to the weights of `model`, and return each rank's digest shares."""
        self.version += 1
        self.engine.pause("keep", TIMEOUT_S)
        loaded = self.threads.submit(self.engine.load, self.version, TIMEOUT_S)
        tensors = in_files(model)[0]
        for bucket in self.plan.buckets():
            index = bucket.index % self.plan.slots
            for slots in self.slots:
                for piece in bucket.pieces:
                    meta = self.plan.tensors[piece.tensor]
                    cut = tensors[meta.name].detach()[piece.box.slices()]
                    cut = cut.to(getattr(torch, meta.dtype)).contiguous()
                    slots[index].tensor[piece.offset : piece.offset + piece.nbytes] = cut.view(-1).view(
                        torch.uint8
                    )
                synchronize(slots[index].tensor.device)
            for feed in self.feeds:
                feed.send(Ready(self.version, bucket.index))
            for feed in self.feeds:
                feed.wait_done(self.version, bucket.index, TIMEOUT_S)
            for slots in self.slots:
                slots[index].tensor.fill_(0xAA)  # whoever reads it late has garbage now
        digests = [rank.digests for rank in loaded.result(TIMEOUT_S)]
        self.engine.resume(self.version)
        return digests

    def sent(self, model: PreTrainedModel) -> Digests:
        """The digests of a model's whole tensors, in the order of the plan."""
        tensors = in_files(model)[0]
        digests = [tensor_digest(tensors[meta.name], meta.shape) for meta in self.plan.tensors]
        return np.array(digests, dtype=np.uint64)

    def addresses(self) -> list[dict[str, int]]:
        """Of every rank's live parameters."""
        return self.engine.on_ranks("addresses")

    def close(self) -> None:
        self.engine.close()
        self._disconnect()
        self.threads.shutdown()

    def _disconnect(self) -> None:
        for feed in self.feeds:
            feed.close()
        for slots in self.slots:
            for slot in slots:
                slot.close()
        self.feeds, self.slots = [], []


def in_files(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, str], ...]]:
    """Return a model's tensors, and its (alias, canonical) names, under the names that they have in files."""
    tensors, tied = named_tensors(model)
    name = FileNames.of(model, tensors).name
    return {name(own): each for own, each in tensors.items()}, tuple((name(a), name(b)) for a, b in tied)


def _slot(device: str) -> DeviceBuffer | SharedBuffer:
    if not device:
        return SharedBuffer.create(BUCKET_BYTES)
    with torch.cuda.device(_index(device)):
        return DeviceBuffer.create(BUCKET_BYTES)


def _index(device: str) -> int:
    """Which of our GPUs a layout means."""
    return next(i for i in range(torch.cuda.device_count()) if device_id(torch.device("cuda", i)) == device)
