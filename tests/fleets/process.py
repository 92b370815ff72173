"""One member of a fleet of plain processes: no Ray, and a node in place of an actor.

python -m tests.fleets.process KIND NUMBER ENDPOINT SECRET
"""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol

import torch
from torch import nn

from weightsync.holder.holder import Holder
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalEngine, LocalPeer, LocalTrainer

SHAPES = {"first": (40, 30), "second": (30, 5)}
"""Of the linear layers of the model. Each trainer rank has one layer."""


class ProcessTrainer(TrainerPeer, Protocol):
    async def train(self, seed: int) -> dict[str, str]: ...


class ProcessEngine(EnginePeer, Protocol):
    async def tensors(self) -> dict[str, str]: ...


class Trainer(LocalTrainer):
    """A trainer rank whose weights follow from a seed."""

    def __init__(self, number: int) -> None:
        layer = [*SHAPES][number]
        self._model = nn.ModuleDict({layer: nn.Linear(*SHAPES[layer])})
        super().__init__(ModuleSource(self._model))

    async def train(self, seed: int) -> dict[str, str]:
        """Return a digest of each new tensor."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_()
        return digests(self._model.state_dict())


class Engine(LocalEngine):
    """An engine that says what its tensors are."""

    def __init__(self, name: str) -> None:
        layers = {layer: nn.Linear(*shape) for layer, shape in SHAPES.items()}
        self._held = DictEngine(
            name,
            {n: torch.zeros_like(t) for n, t in nn.ModuleDict(layers).state_dict().items()},
        )
        super().__init__(self._held)

    async def tensors(self) -> dict[str, str]:
        """Return a digest of each tensor."""
        return digests(self._held.tensors)


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor_digest(tensor, tuple(tensor.shape)):016x}" for name, tensor in tensors.items()}


def main(kind: str, number: str, endpoint: str, secret: str) -> None:
    torch.set_num_threads(1)
    peer, protocol = {
        "trainer": lambda: (Trainer(int(number)), ProcessTrainer),
        "holder": lambda: (LocalPeer(Holder(f"holder {number}", "127.0.0.1")), HolderPeer),
        "engine": lambda: (Engine(f"e{number}"), ProcessEngine),
    }[kind]()
    try:
        asyncio.run(Node(NodeOffer(endpoint, secret), peer, protocol).serve())
    finally:
        if kind == "holder":
            peer.target.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
