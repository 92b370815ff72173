"""Has Megatron's data-parallel wrapper complete the parameters of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from weightsync.errors import StateError

__all__ = ["finish"]


def finish(model: nn.Module | Sequence[nn.Module]) -> None:
    """Gather the parameters that the distributed optimizer has updated and left to the next forward pass.

    With ``overlap_param_gather`` a step changes only this rank's share of each bucket, and Megatron gathers
    the others just before a layer needs them. This waits for the gathers that run, and makes those that are
    missing, which is a collective: call it on all ranks of the data-parallel group, after
    ``optimizer.step()`` and before the next forward pass. That pass does not gather them again. Nothing
    happens without such a wrapper, or if the parameters are complete.

    Args:
        model: a model, or the chunks of this rank's pipeline stage, as Megatron wrapped them.

    Raises:
        StateError: the parameters cannot be completed: their wrapper keeps them in another format.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    for wrapper in (found for module in modules for found in _wrappers(module)):
        config = wrapper.ddp_config
        if not (config.use_distributed_optimizer and config.overlap_param_gather):
            continue
        if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            raise StateError(
                "reuse_grad_buf_for_mxfp8_param_ag converts parameters in the forward pass alone: "
                "train without it, or without overlap_param_gather"
            )
        for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def _wrappers(module: nn.Module) -> Iterator[Any]:
    """Yield Megatron's DistributedDataParallel among the wrappers of a model. It may not be imported."""
    kind = getattr(sys.modules.get("megatron.core.distributed"), "DistributedDataParallel", None)
    inner: object = module
    while isinstance(inner, nn.Module):
        if kind is not None and isinstance(inner, kind):
            yield inner
        inner = getattr(inner, "module", None)
