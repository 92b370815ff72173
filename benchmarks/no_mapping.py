"""Keeps processes on two Ray nodes of this host from mapping each other's memory, as on two hosts.

Ray calls `use_sockets` when it starts a process of a node.
"""

from __future__ import annotations

import ray

from weightsync.protocol.handles import Offer
from weightsync.readers import mapped

__all__ = ["use_sockets"]


def use_sockets() -> None:
    """Refuse to map memory that a holder with another address offers."""
    can_map = mapped.can_map

    def can_map_here(offer: Offer) -> bool:
        host = offer.endpoint.rpartition(":")[0].removeprefix("tcp://")
        return host == ray.util.get_node_ip_address() and can_map(offer)

    mapped.can_map = can_map_here
