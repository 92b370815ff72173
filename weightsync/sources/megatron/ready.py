"""Has Megatron's data-parallel wrapper complete the parameters of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from weightsync.errors import StateError
from weightsync.sources.megatron.chunks import as_modules

_HOOK = "DistributedDataParallel._make_forward_pre_hook."
"""Begins the name of the hook with which Megatron's wrapper gathers parameters on use."""


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
        StateError: the parameters cannot be completed: their wrapper was not given, or keeps them in another
            format until the forward pass.
    """
    for module in [model] if isinstance(model, nn.Module) else model:
        wrappers = [*_wrappers(module)]
        for wrapper in wrappers:
            _complete(wrapper)
        if not wrappers and _is_gathered_by_hooks(module):
            raise StateError(
                "DistributedDataParallel gathers parameters in the forward pass (overlap_param_gather): "
                "give the model in that wrapper, so that they can be gathered before they are sent"
            )


def _complete(wrapper: Any) -> None:  # noqa: ANN401 - Megatron's DistributedDataParallel
    config = wrapper.ddp_config
    if not (config.use_distributed_optimizer and config.overlap_param_gather):
        return
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        raise StateError(
            "reuse_grad_buf_for_mxfp8_param_ag converts parameters in the forward pass alone: "
            "train without it, or without overlap_param_gather"
        )
    groups = (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups)
    missing = [
        each for each in groups if each.param_gather_handle is not None or not each.param_gather_dispatched
    ]
    with _after_all_streams(wrapper) if missing else nullcontext():
        for group in missing:
            group.start_param_sync(force_sync=True)


@contextmanager
def _after_all_streams(module: nn.Module) -> Iterator[None]:
    """Make a module's GPU current, and wait for it before and after: calls arrive on threads of their own."""
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the optimizer may still write, on another stream
        yield
        torch.cuda.synchronize()


def _is_gathered_by_hooks(module: nn.Module) -> bool:
    """Return True if the model inside of `module` is also in a wrapper of Megatron's that gathers on use."""
    (inner,) = as_modules(module)
    hooks = inner._forward_pre_hooks.values()
    return any(getattr(hook, "__qualname__", "").startswith(_HOOK) for hook in hooks)


def _wrappers(module: nn.Module) -> Iterator[Any]:
    """Yield Megatron's DistributedDataParallel among the wrappers of a model. It may not be imported."""
    kind = getattr(sys.modules.get("megatron.core.distributed"), "DistributedDataParallel", None)
    inner: object = module
    while isinstance(inner, nn.Module):
        if kind is not None and isinstance(inner, kind):
            yield inner
        inner = getattr(inner, "module", None)
