"""A neighbour's memory by its handle, on the host or on a device."""

from __future__ import annotations

from typing import TypeAlias

from weightsync.memory.device import DeviceBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import DeviceHandle, Handle

__all__ = ["Buffer", "open_buffer"]


Buffer: TypeAlias = SharedBuffer | DeviceBuffer


def open_buffer(handle: Handle) -> Buffer:
    """Map a neighbour's buffer. Raises PeerLostError or TransportError when that cannot be."""
    return DeviceBuffer.open(handle) if isinstance(handle, DeviceHandle) else SharedBuffer.open(handle)
