"""The live parameters that one side's ranks declare, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.tensors import ITEMSIZE, TensorMeta, suggest

__all__ = ["DTYPES", "Buffers", "Int32", "Int64"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

DTYPES = {name: code for code, name in enumerate(ITEMSIZE)}
"""A number per dtype, for columns."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Buffers:
    """m live parameters, and k regions of them that stay as they are.

    Attributes:
        metas: (rank, name, dtype and local shape).
        key: int64[m], ascending: rank * num_names + the name's number; order: int64[m], its
            position in `metas`.
        nbytes: int64[m]; dtype: int32[m], by `DTYPES`.
        pad_buffer, pad_offset, pad_nbytes: int64[k]; pad_buffer is a position in `metas`.
    """

    metas: tuple[tuple[int, TensorMeta], ...]
    num_names: int
    key: Int64
    order: Int64
    nbytes: Int64
    dtype: Int32
    pad_buffer: Int64
    pad_offset: Int64
    pad_nbytes: Int64

    @classmethod
    def build(
        cls,
        metas: tuple[tuple[int, TensorMeta], ...],
        padding: Sequence[tuple[int, str, int, int]],
        names: dict[str, int],
    ) -> Buffers:
        """`padding` is (rank, buffer, byte offset, nbytes); `names` numbers the buffers' names.

        Raises:
            PlanError: a rank declares a buffer twice, or padding outside of those that it declares.
        """
        key = np.array([rank * len(names) + names[meta.name] for rank, meta in metas], np.int64)
        order: Int64 = np.argsort(key, kind="stable")
        twice = np.flatnonzero(np.diff(key[order]) == 0)
        if len(twice):
            rank, meta = metas[int(order[twice[0]])]
            raise PlanError(meta.name, f"rank {rank} declares this live parameter twice; name it once")
        numbers = {(rank, meta.name): number for number, (rank, meta) in enumerate(metas)} if padding else {}
        for rank, name, _, _ in padding:
            if (rank, name) not in numbers:
                hint = suggest(name, [meta.name for other, meta in metas if other == rank])
                raise PlanError(
                    name, f"rank {rank} pads it, but does not declare it as a live parameter; {hint}"
                )
        rows = [(numbers[rank, name], start, size) for rank, name, start, size in padding if size]
        for number, start, size in rows:
            meta = metas[number][1]
            if not 0 <= start < start + size <= meta.nbytes:
                problem = f"bytes {start} to {start + size} are to stay as they are, and lie outside"
                raise PlanError(meta.name, f"rank {metas[number][0]}: {problem} its {meta.nbytes} bytes")
        pads = np.array(rows, np.int64).reshape(-1, 3)
        return cls(
            metas=metas,
            num_names=len(names),
            key=key[order],
            order=order,
            nbytes=np.array([meta.nbytes for _, meta in metas], np.int64),
            dtype=np.array([DTYPES[meta.dtype] for _, meta in metas], np.int32),
            pad_buffer=pads[:, 0],
            pad_offset=pads[:, 1],
            pad_nbytes=pads[:, 2],
        )

    def find(self, rank: Int32, name: Int32) -> Int64:
        """Position in `metas` of each (rank, number of a name); -1 where that is not declared."""
        key = rank.astype(np.int64) * self.num_names + name
        at = np.minimum(np.searchsorted(self.key, key), len(self.key) - 1)
        found: Int64 = np.where(self.key[at] == key, self.order[at], -1)
        return found
