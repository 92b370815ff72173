"""Servers and readers for memory of other holders, described in README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from weightsync.errors import ConfigError, nearest
from weightsync.readers.base import Read, Readable, Reader, Server
from weightsync.readers.choice import choose_protocol, rdma_devices
from weightsync.readers.parallel import ParallelReader

if TYPE_CHECKING:
    from weightsync.config import Ports
    from weightsync.memory.host import SharedBuffer
    from weightsync.protocol.handles import Offer, ProtocolName

__all__ = [
    "WAYS",
    "Read",
    "Readable",
    "Reader",
    "Server",
    "choose_protocol",
    "open_reader",
    "rdma_devices",
    "serve",
    "serve_unmapped",
]

WAYS = {
    "mapped": "weightsync.readers.mapped:MappedReader",
    "zeromq": "weightsync.readers.zeromq:ZeroMqReader",
    "tcp": "weightsync.readers.mooncake:MooncakeReader",
    "rdma": "weightsync.readers.mooncake:MooncakeReader",
}
"""The reader of each way to read a peer, imported on use."""


def serve(
    buffer: SharedBuffer,
    holder: str,
    host: str,
    protocol: str,
    rdma_device: str = "",
    ports: Ports | None = None,
) -> Server:
    """Let peers read `buffer`: over `protocol`, or by mapping it on the same host.

    `protocol` comes from `choose_protocol`. `host` is this host's address as peers reach it. Any process that
    reaches Mooncake's port can read; ZeroMQ asks for the offer's secret. Raises ConfigError for an unknown
    protocol, or if none of `ports` can be had; TransportError when the server does not start.
    """
    if protocol == "zeromq":
        from weightsync.readers.zeromq_server import SharedMemory, ZeroMqServer

        return ZeroMqServer(SharedMemory(buffer), buffer.handle, holder, host, ports)
    if protocol in ("tcp", "rdma"):
        from weightsync.readers.mooncake import MooncakeServer

        return MooncakeServer(buffer, holder, host, cast("ProtocolName", protocol), rdma_device, ports)
    raise ConfigError("protocol", protocol, nearest(protocol, ("rdma", "tcp", "zeromq")))


def serve_unmapped(memory: Readable, holder: str, host: str, ports: Ports | None = None) -> Server:
    """Let peers read `memory`, which none can map, over ZeroMQ. Raises as `serve`."""
    from weightsync.protocol.handles import BufferHandle
    from weightsync.readers.zeromq_server import ZeroMqServer

    return ZeroMqServer(memory, BufferHandle.unmapped(memory.nbytes), holder, host, ports)


def open_reader(
    targets: Sequence[SharedBuffer], offers: Mapping[str, Offer], *, may_map: bool = True
) -> Reader:
    """Open a reader that fills `targets` from the peers in `offers`.

    With `may_map`, it maps the memory of peers that it finds on this host. It reads others by their offer's
    protocol. Raises ReadError for a peer that ends meanwhile, TransportError when Mooncake does not start.
    """
    by_way: dict[str, dict[str, Offer]] = {}
    for peer, offer in offers.items():
        by_way.setdefault(_way(offer, may_map), {})[peer] = offer
    readers: list[Reader] = []
    try:
        for way, its in by_way.items():
            readers.append(resolve_name(WAYS[way])(targets, its))
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return ParallelReader(targets, offers, readers)


def _way(offer: Offer, may_map: bool) -> str:
    from weightsync.readers.mapped import can_map

    return "mapped" if may_map and can_map(offer) else offer.protocol
