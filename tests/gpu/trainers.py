"""Actors that train a Qwen3 on GPUs with DeepSpeed ZeRO-3, or hold it as Megatron-Core's model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.contract.megatron_ranks import Case, build, fill
from tests.gpu.qwen3_models import save_checkpoint
from weightsync import TrainerShard

__all__ = ["DeepSpeedTrainer", "MegatronTrainer"]

_LEARNING_RATE = 1e-3
_VOCABULARY = 5000


def _join(meeting: str, rank: int, num_ranks: int) -> None:
    os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor its own GPU
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)


class DeepSpeedTrainer(TrainerShard):
    """A ZeRO-3 rank of a checkpoint's model, in bfloat16, with frozen norms."""

    def __init__(self, path: str, rank: int, num_ranks: int, meeting: str) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM

        super().__init__(frozen=["*norm.weight"])
        _join(meeting, rank, num_ranks)
        self._rank = rank
        # torch's own attention may want a newer cuDNN than there is.
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="eager"
        ).cuda()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("norm.weight"))
        self._config = model.config
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def train(self, seed: int) -> float:
        """Take one optimizer step on random tokens. Returns the loss."""
        draw = torch.Generator("cuda").manual_seed(seed * 1000 + self._rank)
        tokens = torch.randint(0, _VOCABULARY, (1, 32), generator=draw, device="cuda")
        loss = self.model(tokens, labels=tokens).loss
        self.model.backward(loss)
        self.model.step()
        return loss.item()

    def save(self, path: str) -> None:
        """Save the checkpoint that DeepSpeed gathers."""
        import deepspeed

        parameters = dict(self.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            if self._rank == 0:
                whole = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
                save_checkpoint(Path(path), self._config, whole)
        dist.barrier()


class MegatronTrainer(TrainerShard):
    """A rank of Megatron-Core's model, which takes its weights from checkpoints in place of training."""

    def __init__(self, path: str, rank: int, num_ranks: int, meeting: str, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from transformers import AutoConfig

        super().__init__()
        _join(meeting, rank, num_ranks)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp, expert_model_parallel_size=case.ep
        )
        model_parallel_cuda_manual_seed(1)
        (model,) = build(case, Path(path))
        self.model = model.bfloat16().cuda()
        self.hf_config = AutoConfig.from_pretrained(path)

    def load(self, path: str) -> None:
        """Fill the model from a checkpoint, with NaN where the vocabulary is padded."""
        fill(self.model, load_file(Path(path) / "model.safetensors"))
        torch.cuda.synchronize()
