"""A rank that holds a checkpoint in bfloat16, cut by FSDP2 over gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from weightsync import TrainerShard


class Bf16Trainer(TrainerShard):
    """Takes its weights from checkpoints in place of training."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        meeting: str,
        path: str,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        super().__init__(str(rank), quantization=quantization)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (num_ranks,)))

    def load(self, path: str) -> None:
        """Take the weights of another checkpoint of the same shape."""
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
        set_model_state_dict(self.model, whole, options=StateDictOptions(full_state_dict=True))
