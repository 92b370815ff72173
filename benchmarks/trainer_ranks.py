"""Ranks of DeepSpeed ZeRO-3 and of Megatron-Core that hold a benchmark's model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.gpu_fleet import Model, device_used, register
from benchmarks.models import Tensor
from benchmarks.values import Held, fill
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.memory.tensors import device_id, segment_view
from weightsync.plan import RankLayout
from weightsync.recipes.forecast.shapes import ModelShape
from weightsync.sources import make_source
from weightsync.sources.megatron import local_weights

__all__ = ["MegatronRank", "TrainerRank", "ZeroRank"]


class TrainerRank(TrainerShard):
    """Base of both kinds: values to write, and this process's memory."""

    _held: Sequence[Held] = ()

    def __init__(self, rank: int, num_ranks: int, meeting: str) -> None:
        super().__init__()
        self.rank = rank
        os.environ["LOCAL_RANK"] = "0"  # each process sees its own GPU
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)

    def change(self, version: int) -> None:
        """Write `version` into every element."""
        fill(self._held, version)
        torch.cuda.synchronize()

    def used(self) -> tuple[str, int]:
        """Return this process's GPU and its bytes in use."""
        return device_used()

    def _hold(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> None:
        tensors = {meta.name: Tensor(meta.name, meta.shape) for meta in layout.tensors}
        self._held = [
            (tensors[segment.tensor], segment.box, segment_view(live[segment.buffer], segment))
            for segment in layout.segments
        ]


class ZeroRank(TrainerRank):
    """A ZeRO-3 rank in bfloat16, without an optimizer."""

    def __init__(self, rank: int, num_ranks: int, meeting: str, model: Model) -> None:
        import deepspeed

        super().__init__(rank, num_ranks, meeting)
        module = nn.Module()
        modules = {"": module}
        for tensor in model:
            register(modules, tensor.name, torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda"))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
        self.model, *_ = deepspeed.initialize(model=module, config=config)
        torch.cuda.empty_cache()
        self._parameters = list(module.named_parameters())
        self._hold(
            make_source(self.model).layout(),
            {name: vars(held)["ds_tensor"] for name, held in self._parameters},
        )

    def broadcast(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        """Send parameters to every engine rank one by one, as OpenRLHF does on shared GPUs.

        The parameter is gathered and cloned, and engines map the clone. Source: OpenRLHF 0.8,
        ``broadcast_to_vllm`` with ``use_cuda_ipc``.
        """
        import deepspeed
        import ray

        handles: list[Any] = [None] * dist.get_world_size()
        for name, parameter in self._parameters:
            with deepspeed.zero.GatheredParameters([parameter]):
                weight = parameter.data.clone()
                mine = {device_id(weight.device): reduce_tensor(weight)}  # type: ignore[no-untyped-call]
                dist.all_gather_object(handles, mine)
                if self.rank == 0:
                    merged = {device: handle for each in handles for device, handle in each.items()}
                    ray.get([rank.update_weight.remote(name, merged) for rank in ranks])
                dist.barrier()
        torch.cuda.synchronize()


class MegatronRank(TrainerRank):
    """A rank of Megatron-Core's model, with Megatron-Core's own layers, in bfloat16."""

    def __init__(self, rank: int, num_ranks: int, meeting: str, shape: ModelShape, tp: int, ep: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from transformers import Qwen3MoeConfig

        super().__init__(rank, num_ranks, meeting)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep)
        model_parallel_cuda_manual_seed(1)
        config = _megatron_config(shape, tp, ep)
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"),
            vocab_size=shape.vocab_size,
            max_sequence_length=32,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
        )
        self.model.bfloat16().cuda()  # norms are made in float32, on the host
        self.hf_config = Qwen3MoeConfig(vocab_size=shape.vocab_size)
        live = local_weights(self.model, "qwen3_moe", vocab_size=shape.vocab_size).tensors
        self._hold(make_source(self.model, hf_config=self.hf_config).layout(), live)


def _megatron_config(shape: ModelShape, tp: int, ep: int) -> Any:  # noqa: ANN401 - Megatron need not be there
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert shape.moe is not None
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.moe.intermediate_size,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        params_dtype=torch.bfloat16,
        bf16=True,
        perform_initialization=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        num_moe_experts=shape.moe.num_experts,
        moe_ffn_hidden_size=shape.moe.intermediate_size,
        moe_router_topk=8,
        moe_grouped_gemm=False,
        moe_router_load_balancing_type="none",
    )
