"""Multi-token prediction layers (MTP) of vLLM: which tensors of the target's own checkpoint they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from weightsync.plan import Box, TensorMeta
from weightsync.plan.layout.balance import Stretch
from weightsync.plan.layout.experts import stacked

MTP = "mtp"
"""vLLM's method. It calls all others, such as ``deepseek_mtp``, so when it starts."""

_AFTER_LAYERS, _OWN_LAYERS = ("Glm4MoeMTPModel", "DeepSeekMTPModel"), "MiMoMTPModel"
ARCHITECTURES = (*_AFTER_LAYERS, _OWN_LAYERS)
"""vLLM's names of the models whose layers are known."""

_BLOCK = "mtp_block."
"""Part of vLLM's names for tensors that a layer of the target has, too. Checkpoints leave it out."""


def prefixes(hf_config: Any) -> tuple[str, ...]:  # noqa: ANN401 - transformers'
    """Return the prefixes of a draft's tensors; () for an unknown architecture.

    `hf_config` is the draft's config, which vLLM derives from the target's config.
    """
    architecture = hf_config.architectures[0]
    if architecture not in ARCHITECTURES:
        return ()
    numbers = range(hf_config.num_nextn_predict_layers)
    if architecture in _AFTER_LAYERS:  # the checkpoint numbers them after the target's layers
        return tuple(f"model.layers.{hf_config.num_hidden_layers + n}." for n in numbers)
    return tuple(f"model.mtp_layers.{n}." for n in numbers)


def tensors_of(
    headers: Mapping[str, Mapping[str, Any]], begin: tuple[str, ...], dtype: str, wide: Collection[str]
) -> tuple[TensorMeta, ...]:
    """Return the tensors of the layers, with single experts stacked as transformers' models have them.

    Args:
        headers: dtype and shape of each tensor in the checkpoint's files, as safetensors says them.
        begin: the result of `prefixes`.
        dtype: the engine's.
        wide: the tensors that the engine stores in float32, whatever the engine's dtype is.
    """
    metas = [*_metas(headers, begin, dtype, wide)]
    whole = [Stretch(meta.name, Box.whole(meta.shape), meta.itemsize, 0, 0) for meta in metas]
    return stacked(metas, whole)[0]


def held_in_float32(draft: torch.nn.Module) -> frozenset[str]:
    """Return the checkpoint's names of the parameters that vLLM has in float32, such as routers."""
    held = draft.named_parameters(remove_duplicate=False)
    return frozenset(name.replace(_BLOCK, "") for name, each in held if each.dtype == torch.float32)


def _metas(
    headers: Mapping[str, Mapping[str, Any]], begin: tuple[str, ...], dtype: str, wide: Collection[str]
) -> Iterator[TensorMeta]:
    for name, header in sorted(headers.items()):
        if name.startswith(begin):
            yield TensorMeta(name, "float32" if name in wide else dtype, tuple(header["shape"]))
