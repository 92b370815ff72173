"""Servers and readers for memory of other holders, described in README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.readers.base import Read, Readable, Reader, Server
from weightsync.readers.parallel import open_reader
from weightsync.readers.ways import ENCRYPTED, NETWORK, choose_protocol, rdma_devices, way_of

if TYPE_CHECKING:
    from weightsync.config import Ports
    from weightsync.memory.host import SharedBuffer

__all__ = [
    "ENCRYPTED",
    "NETWORK",
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


def serve(
    buffer: SharedBuffer,
    holder: str,
    host: str,
    protocol: str,
    rdma_device: str = "",
    ports: Ports | None = None,
) -> Server:
    """Let peers read `buffer`: over `protocol`, or by mapping it on the same host.

    `protocol` comes from `choose_protocol`. `host` is this host's address for peers. Any process that reaches
    Mooncake's port can read; ZeroMQ asks for the offer's secret. Raises ConfigError for an unknown protocol,
    or if all `ports` are in use; TransportError if the server does not start.
    """
    server: Server = way_of(protocol).has("serve")(buffer, holder, host, protocol, rdma_device, ports)
    return server


def serve_unmapped(
    memory: Readable, holder: str, host: str, ports: Ports | None = None, protocol: str = "zeromq"
) -> Server:
    """Let peers read `memory`, which they cannot map, over ZeroMQ. Raises the errors of `serve`.

    `protocol`: "zeromq", or "curve" to encrypt.
    """
    from weightsync.protocol.handles import BufferHandle
    from weightsync.readers.zeromq_server import ZeroMqServer

    return ZeroMqServer(memory, BufferHandle.unmapped(memory.nbytes), holder, host, ports, protocol)
