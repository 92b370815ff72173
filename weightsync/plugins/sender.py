"""The trainer's end of a communicator with workers of engines that the user drives."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch

from weightsync.collectives.tensor_stream import TensorStream
from weightsync.config import Ports, parse_ports
from weightsync.transports import transport_class


class Sender:
    """Rank 0, which sends. Give its `init_info` to the workers, call `open` while they join, then `send`.

    Args:
        host: this host's address for the workers.
        world_size: number of workers plus one.
        transport: ``nccl`` from GPU to GPU, ``gloo`` from host to host.
        bucket_nbytes: see `TensorStream`.
        timeout_s: seconds for all workers to join, and for one bucket.
        ports: the range of the port at which the workers meet, such as ``"29600-29699"``; by default any
            free port.

    Raises:
        ConfigError: no such transport or range, or every port of the range is in use.
        TransportError: see `TensorStream.sending`.
    """

    def __init__(
        self,
        host: str,
        world_size: int,
        transport: str = "nccl",
        bucket_nbytes: int = 256 << 20,
        timeout_s: float = 600.0,
        ports: Ports | str | None = None,
    ) -> None:
        self._transport, self._device = transport_class(transport)(), device_of(transport)
        self._bucket_nbytes, self._timeout_s, self._world_size = bucket_nbytes, timeout_s, world_size
        self._rendezvous = self._transport.offer(host, parse_ports(ports) if ports else None)
        self.init_info = {
            "rendezvous": self._rendezvous,
            "world_size": world_size,
            "rank_offset": 1,
            "transport": transport,
            "timeout_s": timeout_s,
        }
        """Argument of vLLM's ``init_weight_transfer_engine``, for every worker."""

    def open(self) -> None:
        """Open the communicator, from any thread. Returns when all workers have joined."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._transport.open(self._rendezvous, 0, self._world_size, self._timeout_s)
        self._stream = TensorStream(self._transport, 0, self._world_size, self._device, self._bucket_nbytes)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int = 0) -> None:
        """Send whole tensors, by the checkpoint's names. Returns when all workers have verified all."""
        with self._stream.sending(version) as put:
            for name, tensor in tensors:
                put(name, tensor)

    def abort(self, cause: str) -> None:
        """End a `send` on all ranks; may be called from any thread."""
        self._transport.abort(cause)

    def close(self) -> None:
        """Close the communicator. Safe to call twice."""
        self._transport.close()


def device_of(transport: str) -> torch.device:
    """Return the device whose memory a transport moves in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")
