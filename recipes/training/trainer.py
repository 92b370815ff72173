"""The quickstart's trainer actor: a learner whose shard WeightSync can read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import ray
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from weightsync.actors.trainer_shard import TrainerShard
from weightsync.config import Ports
from weightsync.protocol.ports import listen
from weightsync.protocol.routes import joined, keep_to_interface_of, own_address
from weightsync.recipes.config.recipe import LoopSpec, TrainerSpec
from weightsync.recipes.forecast.quantised import INT4
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.recipes.training.learner import Learner

PATIENCE = timedelta(seconds=60)


class GrpoTrainer(TrainerShard):
    """One trainer rank. Call ``listen`` on rank 0, then ``join`` on all, then train."""

    def __init__(
        self,
        rank: int,
        spec: TrainerSpec,
        model_path: str,
        loop: LoopSpec,
        slot: str | None,
        device: str,
        draft_path: str = "",
    ) -> None:
        super().__init__(slot, offloads=loop.sleep > 0, quantization=INT4 if spec.quantize else None)
        self._rank, self._spec = rank, spec
        self._model_path, self._draft_path = model_path, draft_path
        self._loop, self._device = loop, device
        self._store: TCPStore | None = None

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each log line."""
        return f"{type(self).__name__} {self._rank}"

    def listen(self, ports: Ports | None) -> tuple[str, int]:
        """Open the ranks' rendezvous on one of `ports`, or a free one. Returns address and port."""
        self._store, meeting = rendezvous(ray.util.get_node_ip_address(), ports)
        return meeting

    def join(self, address: str, port: int) -> None:
        """Join the other ranks and load this rank's shard. Returns when all have joined."""
        backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
        join_ranks(self._store, address, port, backend, self._rank, self._spec.count)
        self._learner = Learner(self._model_path, self._loop, self._spec, self._device, self._draft_path)
        self.model, self.hf_config = self._learner.model, self._learner.hf_config
        self.draft = self._learner.draft
        if self._loop.sleep:
            self.offload()

    def train_step(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Train on this rank's groups, see :meth:`weightsync.recipes.training.learner.Learner.train_step`."""
        with self._turn():
            return self._learner.train_step(groups)

    def scramble(self) -> None:
        """Replace all weights by random numbers."""
        with self._turn():
            self._learner.scramble()

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the greedy tokens after each prompt."""
        with self._turn():
            return self._learner.greedy(prompts, num_tokens)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Load the shard for the duration, and offload it afterwards, if GPUs are shared."""
        if not self._loop.sleep:
            yield
            return
        self.onload()
        yield
        self.offload()


def rendezvous(address: str, ports: Ports | None) -> tuple[TCPStore, tuple[str, int]]:
    """Open a rendezvous on one of `ports`, or a free port. Returns store, and address and port."""
    listening = listen(address, ports, "no rendezvous of trainers can be served")
    port: int = listening.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=PATIENCE,
        master_listen_fd=listening.detach(),
    )
    return store, (address, port)


def join_ranks(
    store: TCPStore | None, address: str, port: int, backend: str, rank: int, num_ranks: int
) -> None:
    """Make torch's default group over the interface that leads to the rendezvous. `store`: rank 0's own."""
    keep_to_interface_of(own_address(joined(address, port)))
    store = store or TCPStore(address, port, is_master=False, timeout=PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
