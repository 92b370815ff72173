"""The output of `weightsync doctor --cluster`: rows of hosts and pairs, and their problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations

from weightsync.actors.ray.versions import REMEDY, by_version
from weightsync.config import Ports
from weightsync.readers.ways import way_of
from weightsync.text import table_text

SHARED = ("weightsync", "torch", "nccl")
"""Libraries that should have one version on all hosts."""
MAX_APART_MS = 1000.0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of one host.

    Attributes:
        node: Ray's node id.
        name: the hostname.
        address: the address that Ray and other hosts use.
        boot_id: the kernel's id of this start of the machine.
        versions: versions by distribution; empty if a library is not installed.
        gpus: names of the GPUs that torch sees.
        devices: ``cuda:<UUID>`` of each GPU, or one slot. Each device has a holder.
        rdma: names of RDMA devices.
        refill: the protocol by which other hosts read this host's snapshots.
        within: the way of weights between processes of this host.
        free_ports: number of ports of the range that can be bound; None without a range.
        ports_problem: why no port can be bound; empty if ports can.
        offset_ms, uncertainty_ms: this host's clock minus the driver's, and half of the round trip.
        label: the host's name in tables and problems.
    """

    node: str
    name: str
    address: str
    boot_id: str
    versions: Mapping[str, str]
    gpus: Sequence[str]
    devices: Sequence[str]
    rdma: Sequence[str]
    refill: str
    within: str
    free_ports: int | None = None
    ports_problem: str = ""
    offset_ms: float | None = None
    uncertainty_ms: float = 0.0
    label: str = ""

    @property
    def num_ports(self) -> int:
        """Number of ports for a driver and the holders, one holder for each GPU or slot.

        A holder leads a communicator, exchanges messages between hosts, and serves two snapshots: of this
        host and of a neighbour.
        """
        return 1 + len(self.devices) * (2 + 2 * way_of(self.refill).num_ports)


@dataclass(frozen=True, slots=True)
class Pair:
    """One connection that was tried.

    Attributes:
        sender, receiver: labels of the hosts.
        endpoint: address and port on which the receiver listened.
        interface: the sender's interface on the route; empty if unknown.
        problem: why the receiver was not reached; empty if it was reached.
        rtt_ms: round trip in milliseconds.
        gb_per_s: rate of one TCP connection in 1e9 bytes per second.
        broadcast: the transport of a broadcast.
        refill: the protocol by which the receiver would read the sender's snapshots.
    """

    sender: str
    receiver: str
    endpoint: str
    interface: str = ""
    problem: str = ""
    rtt_ms: float | None = None
    gb_per_s: float | None = None
    broadcast: str = ""
    refill: str = ""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """All hosts and pairs. `failures`: by host, why the answer is not complete."""

    hosts: Sequence[HostFacts]
    pairs: Sequence[Pair]
    failures: Mapping[str, str] = field(default_factory=dict)
    ports: Ports | None = None

    def problems(self) -> list[str]:
        """Return one line per problem, with a remedy."""
        found = [f"{text}; {_absent(text)}" for text in self.failures.values()]
        found += [*_versions(self.hosts), *_alike(self.hosts), *_clocks(self.hosts)]
        return [*found, *_ports(self.hosts, self.ports), *_unreachable(self.pairs)]

    def as_json(self) -> dict[str, object]:
        """Return hosts, pairs and problems as values for JSON."""
        return {
            "hosts": [asdict(host) for host in self.hosts],
            "pairs": [asdict(pair) for pair in self.pairs],
            "problems": self.problems(),
        }

    def text(self) -> str:
        """Return a table of hosts, one of pairs, and a line for each problem."""
        tables = [_table([_host_cells(host) for host in self.hosts])]
        tables += [_table([_pair_cells(pair) for pair in self.pairs])]
        problems = "\n".join(f"problem: {text}" for text in self.problems())
        return "\n\n".join(filter(None, [*tables, problems])) or "problem: no host answered"


def rounds(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield rounds of ordered pairs. Each pair is in one round, and no host is twice in a round."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        met = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        if met:
            yield met
            yield [(b, a) for a, b in met]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _absent(text: str) -> str:
    if "No module named" in text:
        return "install the driver's version of weightsync there"
    if "no answer within" in text:
        return "see whether its link is up and it is not overloaded, or give a longer --timeout"
    return "see ray list nodes, and Ray's logs on that host"


def _versions(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for library in SHARED:
        found = by_version(library, ((host.label, host.versions) for host in hosts))
        if len(found) > 1:
            each = "; ".join(f"{version} on {', '.join(names)}" for version, names in found.items())
            yield f"{library} differs: {each}; {REMEDY}"


def _alike(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for one, other in combinations(hosts, 2):
        if shared := _shared(one, other):
            yield (
                f"{one.label} and {other.label} are two Ray nodes with the same {shared}: start Ray once on "
                "each machine, and give each an address of its own with ray start --node-ip-address"
            )


def _shared(one: HostFacts, other: HostFacts) -> str:
    gpus = sorted(device for device in {*one.devices} & {*other.devices} if device.startswith("cuda:"))
    found = [f"address {one.address}"] if one.address == other.address else []
    found += [f"GPU {gpus[0]}"] if gpus else []
    if (one.name, one.boot_id) == (other.name, other.boot_id):
        found.append(f"hostname {one.name} and boot id")
    return ", ".join(found)


def _clocks(hosts: Sequence[HostFacts]) -> Iterator[str]:
    known = [(host.offset_ms, host) for host in hosts if host.offset_ms is not None]
    if not known:
        return
    (low, slow), (high, fast) = (choose(known, key=lambda each: each[0]) for choose in (min, max))
    apart, doubt = high - low, slow.uncertainty_ms + fast.uncertainty_ms
    if apart - doubt > MAX_APART_MS:
        yield (
            f"the clock of {fast.label} is {apart / 1e3:.3f} s ahead of the clock of {slow.label} "
            f"(± {doubt / 1e3:.3f} s): run an NTP client, such as chrony, on both"
        )


def _ports(hosts: Sequence[HostFacts], ports: Ports | None) -> Iterator[str]:
    for host in hosts:
        if host.ports_problem:
            yield f"{host.label}: {host.ports_problem}; give the address of an interface to ray start there"
        elif ports and host.free_ports is not None and host.free_ports < host.num_ports:
            total = ports[1] - ports[0] + 1
            why = (
                "give a wider range"
                if total < host.num_ports
                else "stop the processes that listen there, or give other ports"
            )
            yield (
                f"{host.label}: of ports {ports[0]}-{ports[1]}, {host.free_ports} of {total} are free, and "
                f"its holders and a driver need {host.num_ports}: {why}"
            )


def _unreachable(pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        if pair.problem:
            yield (
                f"{pair.sender} does not reach {pair.receiver} at {pair.endpoint}: {pair.problem}; a "
                "firewall may be the reason (open a range, and give it as sync.ports), or an interface "
                "without a route (choose another address with ray start --node-ip-address)"
            )


def _host_cells(host: HostFacts) -> dict[str, str]:
    clock = "" if host.offset_ms is None else f"{host.offset_ms:+.2f} ± {host.uncertainty_ms:.2f} ms"
    free = "" if host.free_ports is None else f"{host.free_ports} free, {host.num_ports} needed"
    return {
        "host": host.label,
        **host.versions,
        "GPUs": _counted(host.gpus),
        "RDMA": ", ".join(host.rdma),
        "within": host.within,
        "clock": clock,
        "ports": free,
    }


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in sorted({*names}))


def _pair_cells(pair: Pair) -> dict[str, str]:
    cells = {"from": pair.sender, "to": pair.receiver, "at": pair.endpoint, "interface": pair.interface}
    if pair.problem:
        return cells | {"round trip": "unreachable"}
    return cells | {
        "round trip": f"{pair.rtt_ms:.3f} ms",
        "rate": f"{pair.gb_per_s:.4g} GB/s",
        "broadcast": pair.broadcast,
        "refill": pair.refill,
    }


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return aligned columns under their names. A column without values is left out."""
    names = [*dict.fromkeys(name for row in rows for name in row)]
    kept = [name for name in names if any(row.get(name) for row in rows)]
    return table_text([kept, *([row.get(name) or "-" for name in kept] for row in rows)])
