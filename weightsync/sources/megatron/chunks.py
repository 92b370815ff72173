"""What Megatron-Core says about a rank's part of a model: its modules, process groups and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.sources.megatron.cuts import RankGroup, Sizes

_REFUSED = {
    "attention_output_gate": "its checkpoints interleave query and gate heads in another order",
    "moe_mlp_glu_interleave_size": "it interleaves the rows of gate and up",
    "layernorm_zero_centered_gamma": "it trains norms less 1, which is not what the checkpoint holds",
}
"""Settings with which no view of a parameter has the checkpoint's values, and why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model chunk of a pipeline stage, and this rank's place in its process groups.

    Attributes:
        model: the ``GPTModel``, without wrappers.
        tensor, expert_tensor, expert: this rank's place in those groups.
        sizes: sizes of the model.
        stage: number of the pipeline stage.
        num_layers, num_experts: layers of the whole model, and experts of a layer on all ranks.
        is_tied: whether the output layer has the embedding's weights.
    """

    model: nn.Module
    tensor: RankGroup
    expert_tensor: RankGroup
    expert: RankGroup
    sizes: Sizes
    stage: int
    num_layers: int
    num_experts: int
    is_tied: bool

    def layer(self, name: str) -> int:
        """Return the number in the checkpoint, from 0, of the layer ``decoder.layers.3`` or ``mtp.layers.0``.

        Raises:
            ConfigError: the layer does not say which it is.
        """
        number = getattr(self.model.get_submodule(name), "layer_number", None)
        if not isinstance(number, int):
            raise ConfigError("self.model", name, "give layers that have a layer_number, as Megatron's have")
        return number - 1 + (self.num_layers if name.startswith("mtp.") else 0)

    def expert_number(self, local: int) -> int:
        """Return an expert's number in the model by its number on this rank."""
        return self.expert.rank * self.sizes.num_local_experts + local


def as_modules(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a stage without DistributedDataParallel, Float16Module and other wrappers.

    Raises:
        ConfigError: there is none, or one is no module.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError("self.model", model, "give a GPTModel, or the list of a stage's model chunks")
    return [_unwrapped(module) for module in modules]


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def held(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yield each parameter and persistent buffer: chunk, name in it, name in the stage, and tensor.

    The name in the stage begins with the chunk's number if there are several. State that modules pack for
    themselves (``_extra_state``) is left out, and no hook is run.

    Raises:
        ConfigError: there is no chunk, or one is no module.
    """
    modules = as_modules(model)
    for number, chunk in enumerate(modules):
        first = f"{number}." if len(modules) > 1 else ""
        for prefix, module in chunk.named_modules():
            start = f"{prefix}." if prefix else ""
            slots = [*module._parameters.items(), *module._buffers.items()]
            for leaf, tensor in slots:
                if tensor is not None and leaf not in module._non_persistent_buffers_set:
                    yield number, f"{start}{leaf}", f"{first}{start}{leaf}", tensor


def as_chunks(model: nn.Module | Sequence[nn.Module], vocab_size: int | None) -> tuple[Chunk, ...]:
    """Return the chunks of this rank's pipeline stage. `vocab_size` is that of the checkpoint.

    Raises:
        ConfigError: there is no chunk, `vocab_size` is not known, a chunk is no model of Megatron-Core's, or
            it has a setting with which its parameters do not hold a checkpoint's values.
    """
    if not isinstance(vocab_size, int) or vocab_size < 1:
        remedy = "give the checkpoint's vocab_size: Megatron's own is padded, and padding is not sent"
        raise ConfigError("vocab_size", vocab_size, remedy)
    return tuple(_chunk(module, vocab_size) for module in as_modules(model))


def _chunk(model: nn.Module, vocab_size: int) -> Chunk:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_query_groups") or not hasattr(model, "decoder"):
        raise ConfigError(
            "self.model", type(model).__qualname__, "give Megatron-Core's GPTModel, or chunks of one"
        )
    for setting, reason in _REFUSED.items():
        if getattr(config, setting, False):
            given = getattr(config, setting)
            raise ConfigError(f"the model's {setting}", given, f"train without it: {reason}")
    expert = _group(model, "ep", "get_expert_model_parallel_group")
    return Chunk(
        model=model,
        tensor=_group(model, "tp", "get_tensor_model_parallel_group"),
        expert_tensor=_group(model, "expt_tp", "get_expert_tensor_parallel_group"),
        expert=expert,
        sizes=_sizes(config, vocab_size, expert.size),
        stage=_group(model, "pp", "get_pipeline_model_parallel_group").rank,
        num_layers=int(config.num_layers),
        num_experts=int(getattr(config, "num_moe_experts", None) or 0),
        is_tied=bool(getattr(model, "share_embeddings_and_output_weights", False)),
    )


def _sizes(config: Any, vocab_size: int, num_expert_ranks: int) -> Sizes:  # noqa: ANN401 - Megatron's TransformerConfig
    heads = int(config.num_attention_heads)
    is_latent = bool(getattr(config, "multi_latent_attention", False))
    return Sizes(
        vocab_size=vocab_size,
        num_heads=heads,
        num_query_groups=int(config.num_query_groups or heads),
        head_dim=int(config.kv_channels or config.hidden_size // heads),
        q_latent=int(config.q_lora_rank or 0) if is_latent else 0,
        kv_latent=int(config.kv_lora_rank + config.qk_pos_emb_head_dim) if is_latent else 0,
        num_local_experts=int(getattr(config, "num_moe_experts", None) or 0) // num_expert_ranks,
    )


def _group(model: nn.Module, name: str, getter: str) -> RankGroup:
    """Return this rank's place in one of the model's process groups.

    By default they are Megatron's global ones. A group that was not made has one rank.
    """
    groups = getattr(model, "pg_collection", None)
    group = getattr(groups, name, None)
    if group is None:
        from megatron.core import parallel_state

        group = getattr(parallel_state, getter)(check_initialized=False)
    return RankGroup(group.rank(), group.size()) if group is not None else RankGroup()
