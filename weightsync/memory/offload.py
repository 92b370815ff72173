"""Frees the memory of tensors for a while, then restores it at new addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.errors import StateError


class Offload:
    """Tensors without memory, from construction until `undo`. The tensor objects stay the same.

    Views of the same storages have no memory either. Uses ``untyped_storage().resize_``, as FSDP does for
    gathered shards.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], keep: Iterable[torch.Tensor]) -> None:
        """Free `tensors`. Contents of `keep` are copied to the host, page-locked if they were on a GPU.

        Other tensors are zeros after `undo`. Raises StateError, without any effect, if torch does not own the
        memory.
        """
        held = _storages(tensors)
        if not all(storage.resizable() for storage in held.values()):
            raise StateError("memory of another library, or of a mapped file, cannot be given back: copy it")
        devices = {storage.device for storage in held.values() if storage.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)  # kernels may still use them
        self._copies = {key: _copy(storage) for key, storage in _storages(keep).items()}
        self._storages = [(storage, storage.nbytes()) for storage in held.values()]
        for storage in held.values():
            storage.resize_(0)
        if devices:
            torch.cuda.empty_cache()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host copy of a tensor of `keep`, with the tensor's shape and strides."""
        copy = self._copies[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return torch.as_strided(copy, tensor.shape, tensor.stride(), tensor.storage_offset())

    def undo(self) -> None:
        """Allocate the memory again and restore contents. Can be repeated after running out of memory."""
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
            copy = self._copies.get(storage._cdata)
            if copy is not None:
                _bytes(storage).copy_(copy)
            else:
                _bytes(storage).zero_()
        self._storages, self._copies = [], {}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: torch.UntypedStorage) -> torch.Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage))
