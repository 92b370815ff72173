"""Hosts on one machine: namespaces with a network, processes, shared memory and a temporary folder each.

Everything is made inside the caller's network namespace, which should be one of its own: then nothing is left
when the caller ends. Needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patient

_ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0."
SECOND_SUBNET = "10.78.0."
SUBNET_6 = "fd77::"
_INIT = (
    "hostname {name}; mount -t proc proc /proc; mount -t tmpfs shm /dev/shm; mount -t tmpfs tmp /tmp; "
    "ip link set lo up; echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range; exec sleep infinity"
)
KERNELS_PORTS = 40000, 40999
"""The ports that the kernel chooses on each host."""
_HEAD = ["--head", "--port=6379"]
JOBS_PORT = 8265
"""Where the head takes jobs, if it has a dashboard."""
PATIENT = (
    '{"health_check_failure_threshold": 1000, "object_manager_pull_timeout_ms": 200,'
    ' "grpc_client_keepalive_time_ms": 4000, "grpc_client_keepalive_timeout_ms": 16000}'
)
"""Ray's settings with which it waits for a host. By default it declares one dead after half a minute.

A host fetches an object from any host that has it. If it gets no connection, it tries another one after the
second value, by default 10 s, then after twice that time, and so on. It learns from the driver where objects
are. One end of that connection may end while the link is down. The other end notices after the sum of the
last two values, by default 7 minutes, and finds no new object until then.
"""
DEFAULT = "{}"
"""Ray's own settings."""
HASTY = (
    '{"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}'
)
"""Ray's settings with which it declares a host dead some ten seconds after its link went down."""
_NOBODY = "02:00:00:00:00:01"
_FLAGS = ["--net", "--mount", "--pid", "--uts", "--ipc"]


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: its hostname, and the name of its link on the bridge.
        address: on the bridge's network.
        init: the process that holds its namespaces.
    """

    name: str
    address: str
    init: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The first process of the host's own, as seen from outside."""
        return int(Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text())

    @property
    def prefix(self) -> list[str]:
        """What a command begins with to run on the host, in the project's folder."""
        return ["nsenter", f"--target={self.pid}", *_FLAGS, f"--wd={_ROOT}"]

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on the host, in the project's folder."""
        return subprocess.Popen([*self.prefix, *command], text=True, **options)  # type: ignore[call-overload, no-any-return]

    def start_ray(
        self,
        head: str = "",
        settings: str = PATIENT,
        env: Mapping[str, str] | None = None,
        dashboard: bool = False,
    ) -> None:
        """Start a Ray node, with a resource of this host's name. Without `head`'s address it is the head.

        `settings` and `dashboard` are the head's; `env` is added to the environment of its workers.
        """
        shown = ["--include-dashboard=false"]
        if dashboard:
            shown = [f"--dashboard-host={self.address}", f"--dashboard-port={JOBS_PORT}"]
        role = [f"--address={head}:6379"] if head else [*_HEAD, *shown, f"--system-config={settings}"]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *role,
            f"--node-ip-address={self.address}",
            "--num-cpus=1",
            f'--resources={{"{self.name}": 8}}',
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        environment = os.environ | {"PYTHONPATH": str(_ROOT)} | (env or {})  # workers inherit it
        started = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        said, _ = started.communicate(timeout=patient(60))
        if started.returncode:
            raise RuntimeError(f"Ray did not start on {self.name}: {said[-2000:]}")

    def nbytes(self) -> int:
        """Return the bytes that this host has received from the others since it began."""
        return int(Path(f"/sys/class/net/{self.name}/statistics/tx_bytes").read_text())

    def count(self, command: str) -> int:
        """Return how many processes run here with `command` in the first word of their command line."""
        listing = self.start(["ps", "-eo", "stat=,args="], stdout=subprocess.PIPE)
        lines = [line.split() for line in listing.communicate(timeout=patient(10))[0].splitlines()]
        return sum("Z" not in state and command in first for state, first, *_ in lines)

    def kill(self, pid: int) -> None:
        """Kill one of its processes, by the id that it has there."""
        assert self.start(["kill", "-9", str(pid)]).wait(patient(10)) == 0

    def link(self, up: bool) -> None:
        """Connect or cut its link. No packet says so to anybody."""
        _run("ip", "link", "set", self.name, "up" if up else "down")

    def lose(self, other: Host, lost: bool) -> None:
        """Send what goes to `other` to nobody, without a word, or no longer."""
        neighbour = other.address, "dev", "eth0"
        inside = ["nsenter", f"--target={self.pid}", "--net", "ip", "neigh"]
        if lost:
            _run(*inside, "replace", *neighbour, "lladdr", _NOBODY, "nud", "permanent")
        else:
            _run(*inside, "flush", "to", other.address, "dev", "eth0", "nud", "permanent")

    def add_address(self) -> None:
        """Add an address on another network of the same link, `second_address`."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "ip"]
        _run(*inside, "addr", "add", f"{second_address(self.address)}/24", "dev", "eth0")

    def lose_route(self, address: str) -> None:
        """Drop what this host would send to an address."""
        _run("nsenter", f"--target={self.pid}", "--net", "ip", "route", "add", "blackhole", f"{address}/32")

    def mislead(self) -> None:
        """Add an interface that leads nowhere: the first by name and number, with the default route."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "ip"]
        _run(*inside, "link", "add", "aaa0", "type", "veth", "peer", "name", "aaa1")
        _run(*inside, "link", "set", "aaa1", "up")
        _run(*inside, "addr", "add", "192.0.2.77/24", "dev", "aaa0")
        _run(*inside, "link", "set", "aaa0", "up")
        _run(*inside, "route", "add", "default", "via", "192.0.2.1")

    def set_rate(self, mbit_per_s: int) -> None:
        """Limit what this host receives."""
        _run("tc", "qdisc", "replace", "dev", self.name, "root", *_limit(mbit_per_s))

    def set_sending_rate(self, mbit_per_s: int) -> None:
        """Limit what this host sends."""
        inside = ["nsenter", f"--target={self.pid}", "--net"]
        _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", "root", *_limit(mbit_per_s))


class Network:
    """A bridge in the current network namespace, and hosts that it joins."""

    def __init__(self, names: Sequence[str], subnet: str = SUBNET) -> None:
        """`subnet`: what the hosts' only addresses begin with."""
        _run("mount", "-t", "sysfs", "sysfs", "/sys")  # that of this network namespace
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        self.hosts = {name: self._add(name, f"{subnet}{i}") for i, name in enumerate(names, start=1)}

    def crash(self, name: str) -> None:
        """Kill everything that runs on a host, at once. Its network goes, too."""
        host = self.hosts[name]
        os.kill(host.pid, signal.SIGKILL)  # the kernel kills what is in its PID namespace
        host.init.wait(patient(10))
        deadline = time.monotonic() + patient(10)
        while Path(f"/sys/class/net/{name}").exists():
            assert time.monotonic() < deadline, f"the network of {name} is still there"
            time.sleep(0.01)  # the kernel has no event for it

    def boot(self, name: str) -> None:
        """Have a host that crashed come back, with its name and its address."""
        self.hosts[name] = self._add(name, self.hosts[name].address)

    def _add(self, name: str, address: str) -> Host:
        command = ["unshare", *_FLAGS, "--fork", "--kill-child", "sh", "-c", _init(name)]
        host = Host(name, address, subprocess.Popen(command))
        children = Path(f"/proc/{host.init.pid}/task/{host.init.pid}/children")
        deadline = time.monotonic() + patient(10)
        while not children.read_text():
            assert time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.01)  # the kernel has no event for it
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        _run("ip", "link", "set", name, "master", "bridge", "up")
        inside = ["nsenter", f"--target={host.pid}", "--net", "ip"]
        prefix = ("64", "nodad") if ":" in address else ("24",)
        _run(*inside, "addr", "add", f"{address}/{prefix[0]}", "dev", "eth0", *prefix[1:])
        _run(*inside, "link", "set", "eth0", "up")
        return host


def second_address(address: str) -> str:
    """Return the second address of the host that has `address`."""
    return SECOND_SUBNET + address.removeprefix(SUBNET)


def _limit(mbit_per_s: int) -> tuple[str, ...]:
    return ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "100ms")


def _init(name: str) -> str:
    first, last = KERNELS_PORTS
    return _INIT.format(name=name, first=first, last=last)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
