"""A holder's part in the messages that bring engine ranks data from other hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from weightsync.collectives.shuffle import Shuffle
from weightsync.config import Ports
from weightsync.errors import TransportError
from weightsync.plan.cross_host.shuffle import ShufflePlan
from weightsync.protocol.messages import Exchange
from weightsync.transports import Transport

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging


class ExchangeEnd:
    """One holder's end of the exchange, made once per connect.

    Attributes:
        transport: the communicator of the members.
        shuffle: the messages and their memory. None if that memory could not be allocated.
        timeout_s: the seconds of a message, as `set_timeout` gave them; 0 before.
    """

    timeout_s = 0.0

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        plan: ShufflePlan,
        transport: Transport,
        memory: DeviceStaging,
    ) -> None:
        """Prepare the messages of rank `rank` of `members`. Raises the errors of `aim`."""
        self._members, self._rank, self._plan = members, rank, plan
        self.transport, self._memory = transport, memory
        self.shuffle: Shuffle | None = None
        self.aim()

    def aim(self) -> None:
        """Allocate the messages and look up addresses in the trainer's and engine rank's memory.

        Raises TransportError if memory is short, PlanError if a buffer differs from the plan.
        """
        plan, rank = self._plan, self._rank
        source = self._memory.source if rank < plan.num_senders else None
        target = self._memory.target if rank in plan.receivers else None
        self.shuffle = None  # frees memory that the next one can use
        try:
            self.shuffle = Shuffle(plan, rank, self.transport, source=source, target=target)
        except torch.OutOfMemoryError as error:
            most = plan.max_message_bytes
            raise TransportError(f"no memory for messages of {most} bytes: {error}") from error

    def offer(self, host: str, ports: Ports | None) -> Exchange:
        """Return digests of the messages, and the rendezvous if this holder is rank 0."""
        rendezvous = "" if self._rank else self.transport.offer(host, ports)
        return Exchange(rendezvous, *self._plan.digests(self._rank))

    def open(self, rendezvous: str, timeout_s: float) -> None:
        """Join the communicator and use every path once. Raises TransportError."""
        assert self.shuffle
        self.transport.open(rendezvous, self._rank, len(self._members), timeout_s)
        self.shuffle.rehearse()

    def set_timeout(self, timeout_s: float) -> None:
        """Give each message `timeout_s` from now on."""
        self.timeout_s = timeout_s
        self.transport.set_timeout(timeout_s)

    def move(self, wanted: Callable[[], bool]) -> None:
        """Send and receive all messages. If `wanted`, start writing received data to the engine rank.

        Raises TransportError, which says which holders the ranks are.
        """
        assert self.shuffle
        try:
            self.shuffle.move(wanted)
        except TransportError as error:
            holders = ", ".join(map(str, self._members))
            raise TransportError(f"{error} (messages between hosts; ranks are holders {holders})") from error

    def abort(self, cause: str) -> None:
        """Leave the communicator at once, even during `move`."""
        self.transport.abort(cause)

    def close(self) -> None:
        self.transport.close()
