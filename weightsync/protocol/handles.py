"""Handles: plain values by which another process finds and maps memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from weightsync.plan import RankLayout, TensorMeta
from weightsync.plan.direct.stored_reads import StoredRead, stored_reads
from weightsync.plan.layout.formats import Format
from weightsync.plan.layout.layout_table import LayoutTable


class BufferHandle(msgspec.Struct, frozen=True, tag="host"):
    """A name of a buffer of `nbytes`, for other processes of the same user and host.

    `is_file`: the buffer is a file called `name`, which is only read. Without a name nobody can map it.
    """

    pid: int
    fd: int
    name: str
    nbytes: int
    is_file: bool = False

    @classmethod
    def unmapped(cls, nbytes: int) -> BufferHandle:
        """Return the handle of memory that no other process can map."""
        return cls(0, -1, "", nbytes)


class DeviceHandle(msgspec.Struct, frozen=True, tag="device"):
    """A name of `nbytes` of device memory, for other processes on the same GPU.

    `ipc` stands for a whole allocation of process `pid`; the memory starts `offset` bytes into it.
    `device` is ``cuda:<UUID>``, since the same index can mean different GPUs in different processes.
    """

    device: str
    pid: int
    ipc: bytes
    offset: int
    nbytes: int

    @property
    def allocation(self) -> tuple[str, int, bytes]:
        """The allocation of `ipc`: device, process and the handle itself."""
        return self.device, self.pid, self.ipc


Handle: TypeAlias = BufferHandle | DeviceHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Ways to read one buffer's bytes. An offer can be pickled; any process that has it can read them.

    Attributes:
        holder: name of the holder that offers them.
        protocol: how the bytes are served to other hosts.
        memory: how a process of the same host maps the bytes. A process that finds this memory is on that
            host. Without a name, no process can map it.
        endpoint: the address to which `protocol` connects.
        base: the address of byte 0 in the process that serves it (Mooncake).
        secret: shown when a reader connects (ZeroMQ).
    """

    holder: str
    protocol: str
    memory: BufferHandle
    endpoint: str
    base: int = 0
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class HostExport:
    """Host memory of a rank that the holder only reads: layout and handles, of few files."""

    layout: LayoutTable
    buffers: Mapping[str, BufferHandle]


@dataclass(frozen=True, slots=True)
class StoredExport:
    """The places of a quantised checkpoint's tensors in live parameters.

    Attributes:
        layout: the stored tensors, and their places in live parameters.
        dtypes: the dtypes of these parameters, by name.
        formats: the formats of weights to quantise, by the weight's name.
    """

    layout: RankLayout
    dtypes: Mapping[str, str]
    formats: Mapping[str, Format]

    def reads(self, tensors: Sequence[TensorMeta]) -> tuple[StoredRead, ...]:
        """Return the rank's reads of `tensors`, as `stored_reads`. Raises PlanError."""
        return stored_reads(tensors, self.layout, self.dtypes, self.formats)
