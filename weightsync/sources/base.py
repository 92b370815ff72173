"""What a trainer rank has to offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.plan import Plan, RankLayout
    from weightsync.protocol.handles import Attached, BufferHandle
    from weightsync.protocol.messages import Published

__all__ = ["Source"]


class Source(Protocol):
    """One trainer rank's weights, in the process that owns them. Methods block."""

    def layout(self) -> RankLayout:
        """Which boxes of which tensors lie here, in the checkpoint's names.

        Its `device` is set where the memory can be read in place from that device's holder.
        """

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Map the holder's send buffer for trainer rank `trainer`, or export the memory if there is none.

        Once per membership epoch.
        """

    def publish(self, count: bool) -> Published:
        """Copy this rank's share of the plan into the send buffer, or finish writing what is read in place.

        A consistent cut. With a send buffer, the weights may change once this returns; what is read in
        place must stay until the holders have it. Elements that are NaN or Inf are counted, as they
        travel, if that is free or if `count` asks for it.
        """

    def close(self) -> None:
        """Let go of the holder. Safe to call twice."""
