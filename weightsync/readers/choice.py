"""The choice of the protocol that serves a holder's memory to other hosts."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import ConfigError, nearest

if TYPE_CHECKING:
    from weightsync.protocol.handles import ProtocolName

logger = logging.getLogger("weightsync.readers")

DEVICES = Path("/sys/class/infiniband")
_WANTED: dict[str, tuple[ProtocolName, ...]] = {
    "auto": ("rdma", "tcp", "zeromq"),
    "rdma": ("rdma",),
    "tcp": ("tcp",),
    "zeromq": ("zeromq",),
}


def choose_protocol(wanted: str, rdma_device: str = "") -> ProtocolName:
    """Return the first protocol of `wanted` that works on this host.

    `wanted` is auto, rdma, tcp or zeromq. `rdma_device` names one of the host's devices, or several with
    commas; empty means any. If Mooncake is installed, it is tried in its own process, which takes a fraction
    of a second.

    Raises ConfigError when no protocol works, or for an unknown device.
    """
    if wanted not in _WANTED:
        raise ConfigError("sync.refill", wanted, nearest(wanted, _WANTED))
    protocols = _WANTED[wanted]
    if rdma_device and "rdma" in protocols:
        _check_devices(rdma_device)
    for protocol in protocols:
        problem = _absence(protocol)
        if not problem and protocol != "zeromq":
            problem = probe(protocol, rdma_device)
            if problem and wanted == "auto":
                logger.warning("peers on other hosts cannot be read over %s: %s", protocol, problem)
        if not problem:
            logger.info("peers on other hosts are read over %s", _text(protocol, rdma_device))
            return protocol
    raise ConfigError("sync.refill", wanted, problem)


def rdma_devices() -> list[str]:
    """Return the kernel's names of this host's RDMA devices."""
    return sorted(device.name for device in DEVICES.iterdir()) if DEVICES.is_dir() else []


def _check_devices(rdma_device: str) -> None:
    for name in rdma_device.split(","):
        if name not in (found := rdma_devices()):
            raise ConfigError("sync.rdma_device", name, f"this host has {', '.join(found) or 'none'}")


def _absence(protocol: ProtocolName) -> str:
    """Return what `protocol` needs and this host lacks; empty if nothing."""
    if protocol == "rdma" and not rdma_devices():
        return "this host has no RDMA device; take tcp or zeromq"
    if protocol != "zeromq" and importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'weightsync[mooncake]', or take zeromq"
    return ""


def probe(protocol: ProtocolName, rdma_device: str) -> str:
    """Return why Mooncake does not start; empty if it does."""
    problem: str = importlib.import_module("weightsync.readers.mooncake_process").probe(protocol, rdma_device)
    return problem


def _text(protocol: ProtocolName, rdma_device: str) -> str:
    if protocol == "zeromq":
        return "ZeroMQ"
    devices = rdma_device or ", ".join(rdma_devices())
    return f"RDMA ({devices}) with Mooncake" if protocol == "rdma" else "TCP with Mooncake"
