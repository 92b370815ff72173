"""Addresses of this host, chosen by the route to a peer."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

_DISCARD = 9
_LIBRARIES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a bare name as a prefix


def own_address(endpoint: str) -> str:
    """Return this host's address on the network that leads to an endpoint, without brackets.

    `endpoint` is ``host:port`` or ``secret@host:port``, where an IPv6 host has brackets.
    """
    host = host_of(endpoint)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD))  # sends nothing
        return str(probe.getsockname()[0])


def host_of(endpoint: str) -> str:
    """Return the host of ``host:port``, ``[host]:port``, ``tcp://host:port`` or ``secret@host:port``."""
    return endpoint.rpartition("@")[2].rpartition("//")[2].rpartition(":")[0].strip("[]")


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this host, or "" if none has it.

    Also "" for a loopback address: libraries that are told of ``lo`` find no other host.
    """
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return ""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        found = (each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6))
        if any(ipaddress.ip_address(each) == wanted for each in found):
            return name
    return ""


def keep_to_interface_of(address: str) -> None:
    """Have gloo and NCCL use the interface that has an address of this host, where the user chose none.

    NCCL takes the first interface that it finds, and torch's gloo the one that the hostname leads to. Must be
    called before this process uses either.
    """
    if name := interface_of(address):
        for variable, value in _LIBRARIES.items():
            os.environ.setdefault(variable, value.format(name))
