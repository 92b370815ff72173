"""The host memory that a trainer rank publishes into."""

from __future__ import annotations

from weightsync.memory import SharedBuffer
from weightsync.plan import Plan

__all__ = ["arena_for"]


def arena_for(
    plan: Plan, trainer: int, before: Plan | None, arena: SharedBuffer | None
) -> SharedBuffer | None:
    """The arena of `trainer` in `plan`, -1 being nobody: `arena` itself, if it was made for the same bytes.

    `before` is the plan that it was made for. Closes it if it is of no further use. Raises TransportError
    when the host has not that much memory.
    """
    if arena is not None:
        if (
            trainer >= 0
            and before is not None
            and before.tensors == plan.tensors
            and before.trainer_pieces(trainer) == plan.trainer_pieces(trainer)
        ):
            return arena
        arena.close()
    return SharedBuffer.create(plan.arena_nbytes(trainer)) if trainer >= 0 else None
