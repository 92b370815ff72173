"""Trainer ranks of a LoRA adapter under DeepSpeed ZeRO-3, for tests: their processes import this."""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed as dist

from tests.fleets.lora_trainer import LoraTrainer

_LEARNING_RATE = 0.1


class ZeroLoraTrainer(LoraTrainer):
    """One rank of a model with PEFT's default adapter, which DeepSpeed trains."""

    def __init__(self, path: str, rank: int, world: int, merge: str = "") -> None:
        super().__init__(path, {"default": 4}, rank, merge=merge)
        self._num_ranks = world

    def start(self, meeting: str = "") -> None:
        """Load the model, meet the other ranks at a file, and have DeepSpeed cut it."""
        super().start()
        dist.init_process_group("gloo", f"file://{meeting}", rank=self._rank, world_size=self._num_ranks)
        os.environ.update(RANK=str(self._rank), LOCAL_RANK="0", WORLD_SIZE=str(self._num_ranks))
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
        trained = [each for each in self.model.parameters() if each.requires_grad]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200},
        }
        optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE)
        self.model, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    def step(self) -> None:
        """Take one step of the optimiser, on tokens that differ by rank. All ranks have to call it."""
        self.steps += 1
        draw = torch.Generator().manual_seed(1000 * self.steps + self._rank)
        tokens = torch.randint(0, 60, (1, 16), generator=draw)
        self.model.backward(self.model(tokens, labels=tokens).loss)
        self.model.step()
