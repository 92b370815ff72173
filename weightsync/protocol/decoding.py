"""Decodes bytes of other processes.

Bytes that are no message can raise more than msgspec's errors: text that is not UTF-8 raises a
UnicodeDecodeError, deep nesting a RecursionError. A thread that serves peers must not end for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from weightsync.errors import WireError

_MOST = 200
"""Characters of a cause, which may repeat what came."""
D = TypeVar("D")
T = TypeVar("T")


def decoded(decode: Callable[[D], T], data: D, kind: str = "a message of ours") -> T:
    """Return ``decode(data)``. Raises WireError if that raises: `data` is not of this `kind`."""
    try:
        return decode(data)
    except Exception as error:
        raise WireError(f"not {kind}: {str(error)[:_MOST]}") from error


def decoded_one(decode: Callable[[D], T], frames: Sequence[D], kind: str = "a message of ours") -> T:
    """Decode a message of one frame. Raises WireError for anything else."""
    if len(frames) != 1:
        raise WireError(f"{len(frames)} frames, where {kind} is 1")
    return decoded(decode, frames[0], kind)
