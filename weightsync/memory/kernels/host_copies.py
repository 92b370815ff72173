"""Groups of 2-D copies in host memory, the counterpart of `CopyTable` on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightsync.plan.layout.copies import Copies


class AddressCopies:
    """Copies between addresses in host tensors. Copies of one group must not overlap."""

    def __init__(self, copies: Copies, bounds: Sequence[int], memory: Iterable[torch.Tensor]) -> None:
        """
        Args:
            copies: host addresses; copies ``bounds[g]`` to ``bounds[g + 1]`` are group g.
            memory: tensors whose storages contain all addresses. The tensors are kept alive.
        """
        # By storage: tensors may overlap, storages do not.
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in memory if tensor.numel()}
        starts = sorted(storages)
        self._memory = [_all_bytes(storages[start]) for start in starts]
        self._bounds = list(bounds)
        src, dst = (_place(column, np.array(starts, np.int64)) for column in (copies.src, copies.dst))
        columns = (*src, *dst, copies.rows, copies.row_nbytes, copies.src_pitch, copies.dst_pitch)
        self._rows = list(zip(*(column.tolist() for column in columns), strict=True))

    def run(self, group: int) -> None:
        """Run the copies of group `group`."""
        memory = self._memory
        for s, s_at, d, d_at, rows, row_nbytes, s_pitch, d_pitch in self._rows[
            self._bounds[group] : self._bounds[group + 1]
        ]:
            shape = (rows, row_nbytes)
            source = np.ndarray(shape, np.uint8, memory[s], s_at, (s_pitch, 1))
            np.ndarray(shape, np.uint8, memory[d], d_at, (d_pitch, 1))[...] = source


def _all_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return found


def _place(
    address: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of each address's storage, and the offset there."""
    number = np.searchsorted(starts, address, side="right") - 1
    return number, address - starts[number]
