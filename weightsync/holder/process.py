"""A holder's process: the driver's node in it, the faults to inject, and the use of its device's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from weightsync.config import Ports, TlsFiles
from weightsync.faults import Fault, set_faults
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node, serve
from weightsync.protocol.messages import Samples
from weightsync.protocol.peers import HolderPeer
from weightsync.protocol.routes import keep_to_interface_of

_EVERY_S = 0.005


class MemorySampler:
    """Calls `read`, which returns the bytes in use, every 5 ms in a thread, until `stop`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._started = time.perf_counter()
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="sample_memory", daemon=True)
        self._thread.start()

    def stop(self) -> Samples:
        """Stop, and return the samples at which the value changed."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._samples

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        used = self._read()
        if not self._samples or self._samples[-1][1] != used:
            self._samples.append((time.perf_counter() - self._started, used))


class HolderProcess:
    """Base of `Holder`: has what does not depend on a plan.

    Attributes:
        protocol: the methods that the node answers.
    """

    protocol: type = HolderPeer

    def __init__(
        self, name: str, host: str, transport: str, device: str, ports: Ports | None, tls: TlsFiles | None
    ) -> None:
        """See `ConnectingHolder`."""
        keep_to_interface_of(host)
        self.name, self._host, self._ports, self._device = name, host, ports, device
        self._transport_name, self._tls = transport, tls
        self._sampler: MemorySampler | None = None
        self._watched = threading.Event()
        self._node: Node | None = None

    def __repr__(self) -> str:
        """Return the name that Ray puts before each line of this holder's log."""
        return self.name

    def ready(self) -> tuple[str, str, Ports | None, TlsFiles | None]:
        """Return name, transport, ports and files of TLS. Raises the device's error, which is permanent."""
        if self._device:
            torch.cuda.current_stream().query()
        return self.name, self._transport_name, self._ports, self._tls

    def watch(self) -> None:
        """Block until this process ends, until `close`, or until a new driver calls `watch`."""
        self.sample_memory(on=False)  # a driver that died may have left it on
        self._watched.set()
        self._watched = watched = threading.Event()
        watched.wait()

    def serve_node(self, offer: NodeOffer) -> None:
        """Have a node answer the driver's calls. Raises as `Node.serve` if the driver is not reached."""
        self._stop_node()
        self._node = serve(offer, self, self.protocol)
        self._node.welcomed.result()

    def _stop_node(self) -> None:
        if self._node:  # of a driver that died, or of a link that has ended
            self._node.stop()

    def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults to inject here, as `weightsync.faults.set_faults` does."""
        set_faults(process, faults, seed)

    def sample_memory(self, on: bool) -> tuple[str, Samples]:
        """Start or stop the memory sampler. Returns the device and the samples; without a device, neither."""
        seen: Samples = self._sampler.stop() if self._sampler else ()
        self._sampler = MemorySampler(_used_nbytes) if on and self._device else None
        return self._device, seen


def _used_nbytes() -> int:
    """Return the bytes in use, by all processes, on this process's first device."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free
