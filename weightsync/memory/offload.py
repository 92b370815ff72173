"""Giving the memory of tensors back for a while. They stay the objects that they are, at new addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.errors import StateError

__all__ = ["Offload"]


class Offload:
    """From its making to `undo`, tensors have no memory, nor has any view of what they view.

    After FSDP's way with the shards that it gathers (``untyped_storage().resize_``).
    """

    def __init__(self, tensors: Iterable[torch.Tensor], keep: Iterable[torch.Tensor]) -> None:
        """What is in those of `keep` stays on the host, page-locked if it was on a GPU; others are zeros.

        Raises StateError, and has done nothing, where memory is not torch's own.
        """
        held = _storages(tensors)
        if not all(storage.resizable() for storage in held.values()):
            raise StateError("memory of another library, or of a mapped file, cannot be given back: copy it")
        devices = {storage.device for storage in held.values() if storage.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)  # who still writes or reads them
        self._copies = {key: _copy(storage) for key, storage in _storages(keep).items()}
        self._storages = [(storage, storage.nbytes()) for storage in held.values()]
        for storage in held.values():
            storage.resize_(0)
        if devices:
            torch.cuda.empty_cache()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was kept of one of `keep`, as it looks."""
        copy = self._copies[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return torch.as_strided(copy, tensor.shape, tensor.stride(), tensor.storage_offset())

    def undo(self) -> None:
        """Take the memory again, with what was kept. After an out-of-memory error it may be called again."""
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
