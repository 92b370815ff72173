"""A holder's memory by its handle, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weightsync.memory.device import DeviceBuffer, DeviceHandle
from weightsync.memory.host import BufferHandle, SharedBuffer
from weightsync.plan import RankLayout

__all__ = ["Attached", "Buffer", "Export", "Handle", "HostExport", "open_buffer"]

Handle: TypeAlias = BufferHandle | DeviceHandle
Buffer: TypeAlias = SharedBuffer | DeviceBuffer


@dataclass(frozen=True, slots=True)
class Export:
    """A rank's device memory that its holder may read or write: the layout, and each buffer's handle."""

    layout: RankLayout
    buffers: Mapping[str, DeviceHandle]


@dataclass(frozen=True, slots=True)
class HostExport:
    """A rank's host memory that its holder maps and only reads: as `Export`."""

    layout: RankLayout
    buffers: Mapping[str, BufferHandle]


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank's own digest of the plan, and its memory where its holder reads or writes it in place."""

    plan_digest: str
    export: Export | None


def open_buffer(handle: Handle) -> Buffer:
    """Map a neighbour's buffer. Raises PeerLostError or TransportError when that cannot be."""
    return DeviceBuffer.open(handle) if isinstance(handle, DeviceHandle) else SharedBuffer.open(handle)
