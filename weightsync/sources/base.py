"""What a trainer rank has to offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.memory import BufferHandle
    from weightsync.plan import Plan, RankLayout
    from weightsync.verify import Digests

__all__ = ["Source"]


class Source(Protocol):
    """One trainer rank's weights, in the process that owns them. Methods block."""

    def layout(self) -> RankLayout:
        """Which boxes of which tensors lie here, in the checkpoint's names."""

    def attach(self, plan: Plan, trainer: int, arena: BufferHandle) -> str:
        """Map the holder's arena for trainer rank `trainer`; once per membership epoch.

        Returns this rank's own digest of the plan.
        """

    def publish(self) -> Digests:
        """Copy this rank's share of the plan into the arena: a consistent cut.

        Once this returns, the weights may change. Returns, per tensor of the plan, the digest of
        this rank's share, shape ``[num_tensors]``, uint64; the shares of all ranks add up to the
        tensor's digest.
        """

    def close(self) -> None:
        """Drop the arena. Safe to call twice."""
