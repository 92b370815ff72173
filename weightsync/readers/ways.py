"""The registry of ways to read a peer over the network, and the choice of the way that works here.

The registry imports no way: its facts are known before.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from weightsync.errors import ConfigError, nearest

logger = logging.getLogger("weightsync.readers")

DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read peers over the network.

    Attributes:
        module: has `READER`, `serve`, `absence`, `probe` and `text`, see README.md. It is imported on use.
        is_fast: whether copies on other hosts are read at the network's rate, without help of live memory.
        num_ports: ports that a server of one buffer listens on.
        package: needed by the module. Without it, ``auto`` does not import the module.
    """

    module: str
    is_fast: bool = True
    num_ports: int = 1
    package: str = ""

    def has(self, name: str) -> Any:  # noqa: ANN401 - a function or a class
        """Import the module, and return its attribute `name`."""
        return resolve_name(f"{self.module}:{name}")


NETWORK: Mapping[str, Way] = {
    "rdma": Way("weightsync.readers.mooncake", num_ports=2, package="mooncake"),
    "tcp": Way("weightsync.readers.mooncake", num_ports=2, package="mooncake"),
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


def choose_protocol(wanted: str, rdma_device: str = "") -> str:
    """Return the first protocol of `wanted` that works on this host.

    `wanted` is ``auto`` or a name of `NETWORK`. `rdma_device` names one of the host's devices, or several
    with commas; empty means any. Mooncake is tried in a separate process, for a fraction of a second.

    Raises ConfigError if no protocol works, or for an unknown device.
    """
    protocols = tuple(NETWORK) if wanted == "auto" else (wanted,)
    if rdma_device and "rdma" in protocols:
        _check_devices(rdma_device)
    for protocol in protocols:
        way = way_of(protocol, "sync.refill")
        if wanted == "auto" and way.package and importlib.util.find_spec(way.package) is None:
            continue
        module = importlib.import_module(way.module)
        problem = module.absence(protocol)
        if not problem and (problem := module.probe(protocol, rdma_device)) and wanted == "auto":
            logger.warning("peers on other hosts cannot be read over %s: %s", protocol, problem)
        if not problem:
            logger.info("peers on other hosts are read over %s", module.text(protocol, rdma_device))
            return protocol
    raise ConfigError("sync.refill", wanted, problem)


def rdma_devices() -> list[str]:
    """Return the kernel's names of this host's RDMA devices."""
    return sorted(device.name for device in DEVICES.iterdir()) if DEVICES.is_dir() else []


def _check_devices(rdma_device: str) -> None:
    for name in rdma_device.split(","):
        if name not in (found := rdma_devices()):
            raise ConfigError("sync.rdma_device", name, f"this host has {', '.join(found) or 'none'}")
