"""A holder's communicators for broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weightsync.config import Ports
from weightsync.errors import TransportError
from weightsync.holder.staging import Staging
from weightsync.plan import Plan, broadcast_groups
from weightsync.protocol.messages import Group
from weightsync.transports import Broadcast, Pending, Transport


class Communicators:
    """The communicators of one holder, by `broadcast_groups`, none if the plan has no buckets.

    Attributes:
        transports: this holder's end of each communicator, by the communicator's members.
        timeout_s: the seconds of an operation, as `set_timeout` gave them; 0 before.
    """

    timeout_s = 0.0

    def __init__(self, plan: Plan, index: int, together: bool, make: Callable[[], Transport]) -> None:
        groups = broadcast_groups(plan.members, together=together) if plan.slots else {}
        self._plan, self._index = plan, index
        self._group_of = {root: group for root, group in groups.items() if index in group and len(group) > 1}
        self.transports: dict[Group, Transport] = {g: make() for g in sorted(set(self._group_of.values()))}

    def offers(self, host: str, ports: Ports | None) -> dict[Group, str]:
        """Return the addresses of the communicators that this holder leads, see `Transport.offer`."""
        return {g: each.offer(host, ports) for g, each in self.transports.items() if g[0] == self._index}

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        """Open every communicator, in the same order on every holder. Raises TransportError."""
        for group, transport in self.transports.items():
            try:
                transport.open(offers[group], group.index(self._index), len(group), timeout_s)
            except TransportError as error:
                names = ", ".join(f"holder {index}" for index in group)
                raise TransportError(f"{error} (the ranks are {names}, in this order)") from error

    def set_timeout(self, timeout_s: float) -> None:
        """Give each operation of every communicator `timeout_s` from now on."""
        self.timeout_s = timeout_s
        for transport in self.transports.values():
            transport.set_timeout(timeout_s)

    def warm_up(self, device: str) -> None:
        """Broadcast one byte from each rank of each communicator."""
        for group, transport in self.transports.items():
            roots = range(len(group))
            ops = [Broadcast(torch.zeros(1, dtype=torch.uint8, device=device), root) for root in roots]
            transport.start(ops).wait()

    def fill(self, bucket: int, staging: Staging, timeout_s: float) -> list[Pending]:
        """Queue the copies of this holder's share of a bucket, and the bucket's broadcasts."""
        started = [*staging.fill(bucket, timeout_s)]
        for group, transport in self.transports.items():
            steps = [
                step for step in self._plan.bucket_steps(bucket) if self._group_of.get(step.root) == group
            ]
            if steps:
                ops = [Broadcast(staging.at(step), group.index(step.root)) for step in steps]
                started.append(transport.start(ops))
        return started

    def abort(self, cause: str) -> None:
        """Leave every communicator at once, even during an operation."""
        for transport in self.transports.values():
            transport.abort(cause)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
