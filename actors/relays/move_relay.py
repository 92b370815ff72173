"""Has all holders of a host move with one message of the driver, through a holder there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from weightsync.actors.ray.control_channels import ControlChannel, ControlChannels
from weightsync.actors.ray.remote import RemoteHolder
from weightsync.channel.control import ControlOffer, HostMoved
from weightsync.errors import PeerError, WeightSyncError
from weightsync.protocol.messages import Moved, UpdateTask


class MoveRelay:
    """The holders of one host, as the driver calls them together. The first of them calls the others.

    See `weightsync.protocol.peers.MoveRelayPeer`.

    Attributes:
        holders: their indices.
        key: tells it from other relays.
    """

    channel: ControlChannel | None = None

    def __init__(self, channels: ControlChannels, holders: Mapping[int, RemoteHolder]) -> None:
        """`holders`: the holders of the host, by index."""
        self.holders: Sequence[int] = tuple(holders)
        self._channels, self._first = channels, holders[self.holders[0]]
        self._actors = {index: holder.handle for index, holder in holders.items()}
        self.name = f"holders through {self._first.name}"
        self.key: Hashable = ("move", *self._actors.items())

    def answers(self, method: str) -> bool:
        """Return True: each holder's process can relay calls."""
        return True

    async def answer_calls(self, offer: ControlOffer) -> None:
        """Have the holder relay calls of the channel, until the channel is lost. Raises as `answer`."""
        await self._first.relay_moves(offer, self._actors)

    def renew(self) -> None:
        """Open a new channel. The holder then opens new channels to its neighbours."""
        self._channels.forget(self.key)
        self._channels.open(self)

    async def move(
        self, attempt: int, tasks: Mapping[int, tuple[bool, UpdateTask]], timeout_s: float
    ) -> Mapping[int, Moved | WeightSyncError | None]:
        """Have holders move, by index. None could be called while the connection is being made."""
        if not (self.channel and self.channel.is_open):
            self._channels.open(self)  # another one, if it was lost
        elif self.channel.stuck:
            self.renew()
        alike: dict[tuple[bool, UpdateTask], list[int]] = {}
        for index, task in tasks.items():
            alike.setdefault(task, []).append(index)
        asked = tuple((feeding, task, tuple(its)) for (feeding, task), its in alike.items())
        called = self.channel.call("move_all", (attempt, asked, timeout_s)) if self.channel else None
        return _said(await called) if called else dict.fromkeys(tasks)

    async def moved(self) -> Mapping[int, Moved | WeightSyncError | None]:
        """Return new results of holders that move."""
        called = self.channel.call("moved", ()) if self.channel else None
        if called is None:
            raise PeerError(self.name, "there is no connection to it")
        return _said(await called)


def _said(answer: HostMoved) -> Mapping[int, Moved | WeightSyncError | None]:
    moved, errors, uncalled = answer
    return {**moved, **{i: error.rebuild() for i, error in errors.items()}, **dict.fromkeys(uncalled)}
