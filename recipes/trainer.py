"""The quickstart's trainer actor: a learner whose shard the synchroniser can read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from actors.trainer_shard import TrainerShard
from recipes.grpo import Group
from recipes.learner import Learner
from recipes.recipe import LoopSpec

__all__ = ["GrpoTrainer"]

HOST = "127.0.0.1"
PATIENCE = timedelta(seconds=60)


class GrpoTrainer(TrainerShard):
    """One rank of the trainers. First ``listen`` on rank 0, then ``join`` on all, then train."""

    def __init__(self, rank: int, num_ranks: int, model_path: str, loop: LoopSpec, slot: str | None) -> None:
        super().__init__(slot)
        self._rank, self._num_ranks = rank, num_ranks
        self._model_path, self._loop = model_path, loop
        self._store: TCPStore | None = None

    def listen(self) -> int:
        """Open the ranks' meeting point on a free port, and return the port."""
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        return self._store.port

    def join(self, port: int) -> None:
        """Meet the other ranks, and load this rank's shard; returns when all have come."""
        store = self._store or TCPStore(HOST, port, is_master=False, timeout=PATIENCE)
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._num_ranks, timeout=PATIENCE
        )
        self._learner = Learner(self._model_path, self._loop)
        self.model = self._learner.model

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """See :meth:`recipes.learner.Learner.train_step`."""
        return self._learner.train_step(groups)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """See :meth:`recipes.learner.Learner.greedy`."""
        return self._learner.greedy(prompts, num_tokens)
