"""The registry of ways to read a peer over the network, with facts that need no import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from weightsync.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read peers over the network.

    Attributes:
        module: has `READER`, `serve`, `absence`, `probe` and `text`, see README.md. It is imported on use.
        is_fast: whether copies on other hosts are read at the network's rate, without help of live memory.
        num_ports: ports that a server of one buffer listens on.
    """

    module: str
    is_fast: bool = True
    num_ports: int = 1

    def has(self, name: str) -> Any:  # noqa: ANN401 - a function or a class
        """Import the module, and return its attribute `name`."""
        return resolve_name(f"{self.module}:{name}")


NETWORK: Mapping[str, Way] = {
    "rdma": Way("weightsync.readers.mooncake", num_ports=2),
    "tcp": Way("weightsync.readers.mooncake", num_ports=2),
    "zeromq": Way("weightsync.readers.zeromq", is_fast=False),
    "curve": Way("weightsync.readers.zeromq", is_fast=False),
}
"""Ways by protocol, in the order in which ``auto`` tries them."""
ENCRYPTED = "curve"
"""ZeroMQ with encryption. Takes the place of ``auto`` and ``zeromq`` if ``sync.tls`` is set."""


def way_of(protocol: str, field: str = "protocol") -> Way:
    """Return the way of a protocol. Raises ConfigError that names `field`."""
    if protocol not in NETWORK:
        raise ConfigError(field, protocol, nearest(protocol, NETWORK))
    return NETWORK[protocol]
