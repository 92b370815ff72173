"""A holder's memory by its handle, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weightsync.device_memory import DeviceBuffer, DeviceHandle
from weightsync.memory import BufferHandle, SharedBuffer
from weightsync.plan import RankLayout

__all__ = ["Buffer", "Export", "Handle", "open_buffer"]

Handle: TypeAlias = BufferHandle | DeviceHandle
Buffer: TypeAlias = SharedBuffer | DeviceBuffer


@dataclass(frozen=True, slots=True)
class Export:
    """A trainer rank's memory that its holder may read in place: the layout, and each buffer's handle."""

    layout: RankLayout
    buffers: Mapping[str, DeviceHandle]


def open_buffer(handle: Handle) -> Buffer:
    """Map a neighbour's buffer. Raises PeerLostError or TransportError when that cannot be."""
    return DeviceBuffer.open(handle) if isinstance(handle, DeviceHandle) else SharedBuffer.open(handle)
