"""Changes from one safetensors file to another with the same header."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.tiles import Bytes

_WIDTHS = (1, 2, 4, 8)


def delta(old: Path, new: Path) -> Bytes | None:
    """Return the changes as bytes; None if the headers differ or cannot be read, or the file is as short."""
    try:
        was, now = _mapped(old), _mapped(new)
        with safe_open(new, framework="numpy"):
            pass  # the tensors fill the file: changes between them would be lost
        header = _header(now)
        if len(was) != len(now) or header != _header(was):
            return None
        changes = Changes.between(_spans(header), was, now)
    except (SafetensorError, ValueError):  # an empty file
        return None
    if changes.nbytes >= len(now):
        return None
    data = np.empty(changes.nbytes, np.uint8)
    changes.write(data)
    return data


def apply(deltas: Sequence[Path], to: Path) -> None:
    """Apply changes, oldest first, to the file that the first one is based on.

    Raises WireError if they are not changes of this file.
    """
    memory = _mapped(to, "r+")
    spans = _spans(_header(memory))
    for path in deltas:
        Changes.decode(spans, _mapped(path)).apply(memory)


def _mapped(path: Path, mode: Literal["r", "r+"] = "r") -> Bytes:
    return np.memmap(path, np.uint8, mode).view(np.ndarray)


def _header(file: Bytes) -> bytes:
    """Return the JSON before the tensors, b"" if the file is too short for it."""
    end = 8 + int.from_bytes(file[:8].tobytes(), "little")
    return file[8:end].tobytes() if end <= len(file) else b""


def _spans(header: bytes) -> list[Span]:
    tensors = (each for name, each in json.loads(header).items() if name != "__metadata__")
    return [_span(8 + len(header), tensor["data_offsets"], tensor["shape"]) for tensor in tensors]


def _span(start: int, offsets: tuple[int, int], shape: Sequence[int]) -> Span:
    begin, end = offsets
    nbytes = end - begin
    width = nbytes // (math.prod(shape) or 1)
    return Span(start + begin, nbytes, width if width in _WIDTHS and nbytes % width == 0 else 1)
