"""Giving the memory of tensors back for a while. They stay the objects that they are, at new addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Offload"]


class Offload:
    """From its making to `undo`, `tensors` have no memory, nor has any view of what they view.

    After FSDP's way with the shards that it gathers (``untyped_storage().resize_``). The memory must be
    torch's own: raises RuntimeError where it is another library's, or a mapped file.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> None:
        """`keep` what is in them on the host, page-locked for those of a GPU; else they are zeros later."""
        held = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in held.values()]
        self._copies = {key: _copy(storage) for key, storage in held.items()} if keep else {}
        devices = {storage.device for storage, _ in self._storages if storage.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)  # what still reads them
        for storage, _ in self._storages:
            storage.resize_(0)
        if devices:
            torch.cuda.empty_cache()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was kept of one of `tensors`, as it looks."""
        copy = self._copies[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return torch.as_strided(copy, tensor.shape, tensor.stride(), tensor.storage_offset())

    def undo(self) -> None:
        """Take the memory again, with what was kept."""
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
            copy = self._copies.get(storage._cdata)
            if copy is not None:
                _bytes(storage).copy_(copy)
            else:
                _bytes(storage).zero_()
        self._copies = {}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: torch.UntypedStorage) -> torch.Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage))
