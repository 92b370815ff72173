"""What of a plan's tensors has not come yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import TransportError
from weightsync.plan.explain import count_text

if TYPE_CHECKING:
    from weightsync.plan import Box, Plan

__all__ = ["Missing"]


class Missing:
    """Counts elements down; the plan has proven that its pieces do not overlap."""

    def __init__(self, plan: Plan) -> None:
        self._tensors = plan.tensors
        self._left = [meta.numel for meta in plan.tensors]

    def take(self, tensor: int, box: Box) -> bool:
        """Count one piece; whether its tensor is complete with it."""
        self._left[tensor] -= box.numel
        return self._left[tensor] == 0

    def require_none(self) -> None:
        """Raises TransportError, with names, when a tensor is incomplete."""
        names = [meta.name for meta, left in zip(self._tensors, self._left, strict=True) if left]
        if names:
            count = count_text(len(names), "tensor")
            raise TransportError(f"bytes of {count} did not come: {', '.join(names[:3])}")
