"""A rank of Megatron-Core's model on the CPU, as an actor."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.contract.megatron_ranks import Case, build, fill, stay_on_the_host
from weightsync import TrainerShard


class MegatronTrainer(TrainerShard):
    """One rank, which takes its weights from checkpoints in place of training."""

    def __init__(self, rank: int, case: Case, meeting: str, path: str) -> None:
        from megatron.core import parallel_state

        super().__init__(slot=str(rank))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        stay_on_the_host()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp, expert_model_parallel_size=case.ep
        )
        (self.model,) = build(case, Path(path))
        self.hf_config = AutoConfig.from_pretrained(path)

    @torch.no_grad()
    def load(self, path: str) -> None:
        fill(self.model, load_file(Path(path) / "model.safetensors"))
