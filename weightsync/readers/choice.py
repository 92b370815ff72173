"""The choice of the protocol that serves a holder's memory to other hosts."""

from __future__ import annotations

import logging
from pathlib import Path

from weightsync.errors import ConfigError
from weightsync.readers.ways import NETWORK, way_of

logger = logging.getLogger("weightsync.readers")

DEVICES = Path("/sys/class/infiniband")


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
        problem = way.has("absence")(protocol)
        if not problem and (problem := way.has("probe")(protocol, rdma_device)) and wanted == "auto":
            logger.warning("peers on other hosts cannot be read over %s: %s", protocol, problem)
        if not problem:
            logger.info("peers on other hosts are read over %s", way.has("text")(protocol, rdma_device))
            return protocol
    raise ConfigError("sync.refill", wanted, problem)


def rdma_devices() -> list[str]:
    """Return the kernel's names of this host's RDMA devices."""
    return sorted(device.name for device in DEVICES.iterdir()) if DEVICES.is_dir() else []


def _check_devices(rdma_device: str) -> None:
    for name in rdma_device.split(","):
        if name not in (found := rdma_devices()):
            raise ConfigError("sync.rdma_device", name, f"this host has {', '.join(found) or 'none'}")
