"""Trains with Megatron-Core: a dense model is cut by tensor parallelism, a mixture by experts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from weightsync.memory.tensors import segment_view
from weightsync.plan.layout.experts import stack_experts
from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.backends.base import MAX_GRAD_NORM, Backend, adamw
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.sources.megatron import local_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of each library that it does without
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig


class Megatron(Backend):
    """One rank: of tensor parallelism over all ranks, or of a mixture, of expert and data parallelism."""

    def __init__(self, model: nn.Module, loop: LoopSpec, device: str) -> None:
        self.hf_config: Any = model.config
        self._num_experts = getattr(self.hf_config, "num_experts", 0)
        _prepare(device)
        ranks = dist.get_world_size()
        self._is_cut = ranks > 1 and not self._num_experts
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks if self._is_cut else 1,
            expert_model_parallel_size=ranks if self._num_experts else 1,
            distributed_timeout_minutes=1,
        )
        config = _config(self.hf_config)
        gpt = _build(config, self.hf_config).to(device)
        _load(gpt, self.hf_config, model.state_dict())
        settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
        self.model = self._module = DistributedDataParallel(config, settings, gpt)
        self.optimizer = adamw(gpt, loop)

    def share(self, groups: Sequence[PromptGroup]) -> Sequence[PromptGroup]:
        """Return the groups of all ranks, if all of them are one replica of the model."""
        if not self._is_cut:
            return groups
        shares: list[Sequence[PromptGroup]] = [()] * dist.get_world_size()
        dist.all_gather_object(shares, groups)
        return [group for share in shares for group in share]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, as `Backend.forward` says."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)[None].expand_as(tokens)
        is_later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        logits: Tensor = self._module(tokens, positions, is_later[None, None])
        return logits

    def descend(self, loss: Tensor) -> float:
        """Take one optimiser step, as `Backend.descend` says."""
        self.model.zero_grad_buffer()
        torch.autograd.backward(loss)
        finalize_model_grads([self.model])
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def scramble(self) -> None:
        """Replace all weights by random numbers, replicas by the same."""
        for parameter in self.model.parameters():
            parameter.normal_(std=0.02)
            if not self._is_share(parameter):
                dist.broadcast(parameter, src=0)

    def _clip(self) -> float:
        """Clip all gradients by the norm over all ranks. Returns the norm before."""
        parameters = list(self.model.parameters())
        squares = torch.zeros(2, device=parameters[0].device)  # of replicated and of sharded parameters
        for parameter in parameters:
            squares[int(self._is_share(parameter))] += parameter.grad.square().sum()
        dist.all_reduce(squares[1:])
        norm = squares.sum().sqrt()
        dist.broadcast(norm, src=0)  # one number for all, or replicas would drift apart by rounding
        nn.utils.clip_grads_with_norm_(parameters, MAX_GRAD_NORM, norm)
        return norm.item()

    def _is_share(self, parameter: nn.Parameter) -> bool:
        """Return True if other ranks have other elements of this parameter, or other experts."""
        if self._num_experts:
            return not getattr(parameter, "allreduce", True)
        return self._is_cut and bool(getattr(parameter, "tensor_model_parallel", False))


@torch.no_grad()
def _load(gpt: nn.Module, hf_config: Any, checkpoint: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Write a checkpoint's tensors into the parts of them that this rank has."""
    held = local_weights(gpt, hf_config.model_type, vocab_size=hf_config.vocab_size)
    layout = stack_experts(held.layout, held.num_experts) if held.num_experts else held.layout
    for segment in layout.segments:
        part = checkpoint[segment.tensor][segment.box.slices()]
        segment_view(held.tensors[segment.buffer], segment).copy_(part)


def _prepare(device: str) -> None:
    """Have Megatron run without Transformer Engine, and on a CPU."""
    initialize_rng_tracker(inference_rng_tracker=True)  # nothing is drawn: no dropout, and weights are loaded
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks for it, also where it was not imported
    if device == "cpu":
        # It moves rotary frequencies and the counts of experts' tokens to the current GPU.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _build(config: TransformerConfig, wanted: Any) -> nn.Module:  # noqa: ANN401 - transformers' configuration
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=wanted.vocab_size,
        max_sequence_length=wanted.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=wanted.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(wanted.rope_parameters["rope_theta"]),
    )
    return model


def _config(wanted: Any) -> TransformerConfig:  # noqa: ANN401 - transformers' configuration
    """Return Megatron's settings for a Qwen3, or a Qwen3-MoE."""
    mixture: dict[str, Any] = {}
    if num_experts := getattr(wanted, "num_experts", 0):
        mixture = {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": wanted.moe_intermediate_size,
            "moe_router_topk": wanted.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(
        num_layers=wanted.num_hidden_layers,
        hidden_size=wanted.hidden_size,
        num_attention_heads=wanted.num_attention_heads,
        num_query_groups=wanted.num_key_value_heads,
        kv_channels=wanted.head_dim,
        ffn_hidden_size=wanted.intermediate_size,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=wanted.rms_norm_eps,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **mixture,
    )
