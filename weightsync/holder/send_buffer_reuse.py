"""The host memory that a holder sends a trainer rank's share from."""

from __future__ import annotations

from typing import TypeAlias

from weightsync.holder.send_buffer import MappedArena
from weightsync.holder.snapshots import Copy, Keepable
from weightsync.memory.host import SharedBuffer
from weightsync.plan import MAPPED, Plan
from weightsync.protocol.handles import BufferHandle

__all__ = ["Arena", "arena_for", "keepable", "written"]

Arena: TypeAlias = SharedBuffer | MappedArena


def arena_for(
    plan: Plan, trainer: int, source: str, before: Plan | None, arena: Arena | None
) -> Arena | None:
    """The arena of `trainer` in `plan`, -1 being nobody: `arena` itself, if it was made for the same bytes.

    `source` is what the rank's layout says of its device. `before` is the plan that `arena` was made
    for. Closes it if it is of no further use. Raises TransportError when the host has not that much memory.
    """
    if arena is not None:
        if (
            trainer >= 0
            and isinstance(arena, SharedBuffer)
            and source != MAPPED
            and before is not None
            and before.tensors == plan.tensors
            and before.trainer_pieces(trainer) == plan.trainer_pieces(trainer)
        ):
            return arena
        arena.close()
    if trainer >= 0 and source == MAPPED:
        return MappedArena(plan, trainer)
    return SharedBuffer.create(plan.arena_nbytes(trainer)) if trainer >= 0 else None


def keepable(arena: Arena | None) -> Keepable | None:
    """What is kept of it."""
    return Copy(arena) if isinstance(arena, SharedBuffer) else arena


def written(arena: Arena | None) -> BufferHandle | None:
    """Where a trainer rank publishes, if it does."""
    return arena.handle if isinstance(arena, SharedBuffer) else None
