"""Where a module's tensors lie: plain ones, and DTensors as FSDP2 and tensor parallelism leave them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.errors import StateError
from weightsync.modules import named_tensors

__all__ = ["Places", "local_tensor", "local_tensors"]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it. Detached: a copy would otherwise grow a graph with each version."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each of `named_tensors`."""
    return {name: local_tensor(tensor) for name, tensor in named_tensors(module)[0].items()}


class Places:
    """Where some of a module's tensors lie, to be asked before each version.

    Walking a module of 20,000 tensors takes ten times as long as this, which knows the way to each. It
    keeps none of them alive.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` are of `named_tensors`."""
        self._module = module
        self._address = {name: local_tensor(tensor).data_ptr() for name, tensor in tensors.items()}
        modules = list(module.modules())
        inner = [(each._modules, key) for each in modules for key in each._modules]
        self._parents, self._keys = [each for each, _ in inner], [key for _, key in inner]
        self._children = list(map(dict.get, self._parents, self._keys))
        homes: dict[int, tuple[Mapping[str, torch.Tensor | None], str]] = {
            id(tensor): (held, key)
            for each in reversed(modules)  # of tied ones, the first has the name
            for held in (each._parameters, each._buffers)
            for key, tensor in held.items()
        }
        # What a hook of the module's puts into its state_dict is found in none of its modules.
        found = [homes[id(tensor)] for tensor in tensors.values() if id(tensor) in homes]
        self._homes, self._leaves = [held for held, _ in found], [key for _, key in found]

    def require_unmoved(self) -> None:
        """Raises StateError, with the name, when a tensor lies elsewhere by now."""
        if self._as_before():
            return
        live = local_tensors(self._module)  # it may only have been gathered, which its state_dict undoes
        for name, address in self._address.items():
            if live[name].data_ptr() != address:
                raise StateError(f"{name} is in other memory than when it was connected: connect() again")

    def _as_before(self) -> bool:
        if not all(map(is_, map(dict.get, self._parents, self._keys), self._children)):
            return False
        found = [held.get(leaf) for held, leaf in zip(self._homes, self._leaves, strict=True)]
        local = (each._local_tensor if isinstance(each, DTensor) else each for each in found)
        return [each is not None and each.data_ptr() for each in local] == list(self._address.values())
