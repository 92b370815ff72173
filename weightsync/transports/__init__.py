"""Transports by name, imported on use. README.md explains how to add a transport."""

from __future__ import annotations

from pkgutil import resolve_name

from weightsync.errors import ConfigError, nearest
from weightsync.transports.base import Broadcast, Op, Pending, Recv, Send, Transport

__all__ = ["TRANSPORTS", "Broadcast", "Op", "Pending", "Recv", "Send", "Transport", "transport_class"]

TRANSPORTS = {
    "gloo": "weightsync.transports.gloo:GlooTransport",
    "nccl": "weightsync.transports.nccl:NcclTransport",
}


def transport_class(name: str) -> type[Transport]:
    """Import a transport. Raises ConfigError for an unknown name."""
    if name not in TRANSPORTS:
        raise ConfigError("transport", name, nearest(name, TRANSPORTS))
    found: type[Transport] = resolve_name(TRANSPORTS[name])
    return found
