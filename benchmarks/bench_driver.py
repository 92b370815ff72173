"""Costs of the driver as a fleet grows, without weights, GPUs and other processes.

    python -m benchmarks.bench_driver [--ranks 1000] [--tensors 70000] [--rounds 5] [--json FILE]
    python -m benchmarks.bench_driver --mode direct --colocated
    python -m benchmarks.bench_driver --actors 50

The controller, the planner and the messages are real. Peers are objects in the same process, which answer at
once (`benchmarks.driver_peers`): FSDP ranks with rows of every tensor, engines of 8 tensor-parallel ranks,
and a holder for each rank, on hosts of 8 GPUs. There are as many engine ranks as trainer ranks, on separate
hosts or, with ``--colocated``, on the same GPUs. With ``--shards 8``, trainers hold replicas of 8 parts of
each tensor, as under HSDP.
The tensors come from `bench_plan`. Fleets of 10, 100 and ``--ranks`` trainer ranks are measured in separate
processes, limited to ``--part-timeout`` seconds and ``--memory-gib`` of memory. If a fleet exceeds a limit,
the report says so, the fleet's rows so far are written, and the next fleet is measured.

``connect``, ``update`` and ``snapshots`` (holders copy what engines already serve) each have a row:

- ``s`` and ``CPU s`` are the driver's. The time in which peers make and pickle their answers, and compute the
  plan's digest, is taken off both. What is left includes the packing of every argument and the unpacking of
  every answer, together ``pickling s``: by Ray's pickler with a copy of its buffers, as into the object
  store, or for the calls that nodes answer as they travel there. What Ray, or a socket, needs for a
  call is not included. Garbage is not collected while a peer answers. No time passes between a call and its
  answer.
- ``MiB out`` and ``MiB in`` are packed arguments and answers, without what Ray adds to a call. The plan
  and what engine ranks read from other hosts, which peers get by reference, are pickled once (``share``)
  and count once for each host.
- ``peak MiB`` is the process's largest resident memory so far. It includes Ray's modules, the tensors' names,
  an engine's answers, one trainer's answers at a time and, after connecting, one holder's plan; all other
  memory is the driver's.

The driver calls no peer in ``connect: plan`` and ``update: verify``. Updates are medians of the rounds. A
second table has the methods of at least 1 MiB or 10 ms.

In direct mode, a third table has the costs for a holder, of a trainer and of an engine rank, to plan the
messages between hosts. The driver's rows do not include these costs: all holders plan at once. ``peak MiB``
of this table is the memory that the plan allocates.

With ``--actors N``, rows are taken of N real Ray actors that do nothing, each called once in a round, in
parallel, as `actors.ray.remote` calls engines: through Ray and by nodes, in turns. The first
two rounds of each are left out. N other actors are trainers that publish nothing: the driver calls them
itself, and through the holders of groups of 8, in turns (`benchmarks.publish_rounds`).
``--of`` takes one of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import resource
import statistics
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.cluster import kill, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.driver_ledger import Instant, Ledger
from benchmarks.driver_peers import TENSOR_PARALLEL, make_fleet
from benchmarks.gpu_fleet import RankActors
from benchmarks.isolate import asked, emit, run_part, stage
from benchmarks.publish_rounds import measure_publishing
from benchmarks.rounds import NUM_WARM, dialled
from weightsync.actors.engine_calls import EngineCalls
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteEngine, remote_engine
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.driver.updating.controller import Controller
from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms
from weightsync.report import SyncReport

__all__ = ["main"]

_SIZES = (10, 100)
_MODULE = "benchmarks.bench_driver"
_WHOLE, _BY_METHOD, _ACTORS = "the driver's part", "by method", "Ray actors that do nothing"
_HOLDER = "one holder plans its messages between hosts"


@dataclass(frozen=True, slots=True)
class Measured:
    """The driver's time in one phase, and its calls."""

    seconds: Instant
    ledger: Ledger

    @classmethod
    async def of(cls, ledger: Ledger, work: Callable[[], Awaitable[object]]) -> Measured:
        """Clear `ledger`, await `work`, and return the time and the calls of `work`."""
        ledger.clear()
        started = Instant.now()
        await work()
        return cls(Instant.now() - started - ledger.peers, ledger.taken())

    def row(self) -> dict[str, object]:
        costs = self.ledger.costs.values()
        return {
            "s": self.seconds.wall,
            "CPU s": self.seconds.cpu,
            "pickling s": sum(cost.pickling_s for cost in costs),
            "MiB out": sum(cost.nbytes_out for cost in costs) / 2**20,
            "MiB in": sum(cost.nbytes_in for cost in costs) / 2**20,
            "calls": sum(cost.calls for cost in costs),
        }


def sizes(ranks: int) -> list[int]:
    """Return the numbers of trainer ranks to measure, up to `ranks`."""
    return [*(size for size in _SIZES if size < ranks), ranks]


def main() -> None:
    """Measure fleet by fleet, print and write the result."""
    args = _parser().parse_args()
    where = environment(("numpy", "ray"))
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    for spec in _specs(args):
        found, trouble = run_part(_MODULE, spec, args.part_timeout)
        notes += [str(row["trouble"]) for row in found if "trouble" in row] + ([trouble] if trouble else [])
        rows += [row for row in found if "trouble" not in row]
        if args.json:  # write after each part, as a later one may be cut off
            write_json(args.json, "driver", rows, where, notes)
    for title in dict.fromkeys(str(row["table"]) for row in rows):
        shown = [{k: v for k, v in row.items() if k != "table"} for row in rows if row["table"] == title]
        print_table(title, shown, where)
    print("\n".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000, help="trainer ranks of the largest fleet")
    parser.add_argument("--engines", type=int, help="engines of 8 ranks; by default what fits --ranks")
    parser.add_argument("--tensors", type=int, default=70_000)
    parser.add_argument("--rounds", type=int, default=5, help="updates of each fleet")
    parser.add_argument("--mode", nargs="+", default=["broadcast", "direct"], choices=["broadcast", "direct"])
    parser.add_argument("--colocated", action="store_true", help="engines share GPUs with trainers")
    parser.add_argument(
        "--shards", type=int, default=0, help="parts of a tensor; by default as many as ranks"
    )
    parser.add_argument("--actors", type=int, default=0, help="real Ray actors to call; none by default")
    parser.add_argument(
        "--of", nargs="+", default=[*_ACTOR_ROUNDS], choices=_ACTOR_ROUNDS, help="kinds of --actors"
    )
    parser.add_argument("--part-timeout", type=float, default=180.0, help="seconds that a fleet may take")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="memory that a fleet may take")
    parser.add_argument("--json", type=Path, help="write the rows and where they were measured")
    return parser


def _specs(args: argparse.Namespace) -> list[dict[str, object]]:
    limits = {"timeout_s": args.part_timeout, "memory_gib": args.memory_gib, "rounds": args.rounds}
    specs = [
        {
            "ranks": ranks,
            "engines": args.engines or max(1, ranks // TENSOR_PARALLEL),
            "tensors": args.tensors,
            "mode": mode,
            "colocated": args.colocated,
            "shards": args.shards or ranks,
            **limits,
        }
        for ranks in (size - size % (args.shards or 1) for size in sizes(args.ranks))
        for mode in args.mode
    ]
    calls = {"actors": args.actors, "rounds": args.rounds}
    return [*specs, *(calls | {"of": of} for of in args.of)] if args.actors else specs


def _run_part(spec: Mapping[str, object]) -> None:
    if "actors" in spec:
        _ACTOR_ROUNDS[str(spec["of"])](int(str(spec["actors"])), int(str(spec["rounds"])))
        return
    gib = float(str(spec["memory_gib"]))
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), resource.RLIM_INFINITY))
    fleet = {name: spec[name] for name in ("ranks", "engines", "tensors", "mode", "colocated", "shards")}
    try:
        asyncio.run(measure_fleet(fleet, int(str(spec["rounds"])), float(str(spec["timeout_s"]))))
    except MemoryError:
        label = " ".join(f"{name}={value}" for name, value in fleet.items())
        emit({"trouble": f"{label}: needed more than {gib:g} GiB of memory"})


async def measure_fleet(fleet: Mapping[str, object], num_rounds: int, timeout_s: float) -> None:
    """Connect and update one fleet, with a row per phase. Rows include the columns of `fleet`."""
    ledger = Ledger()
    stage(" ".join(f"{name}={value}" for name, value in fleet.items()))
    num_tensors, num_ranks, num_engines = (int(str(fleet[name])) for name in ("tensors", "ranks", "engines"))
    colocated, num_shards = bool(fleet["colocated"]), int(str(fleet["shards"]))
    made = make_fleet(num_tensors, num_ranks, num_engines, ledger, colocated=colocated, num_shards=num_shards)
    # The driver's deadlines include the peers' time.
    config = SyncConfig.from_dict(
        {"mode": fleet["mode"], "timeout_s": timeout_s, "connect_timeout_s": timeout_s}
    )
    controller = Controller(config, made)
    stage("connect")

    async def connect() -> None:
        await controller.connect()
        await controller.snapshot_index.settled()  # or holders' memory for it would count as an update's

    connected = await Measured.of(ledger, connect)
    phases: list[Mapping[str, float]] = []
    updates, snapshots = [], []
    emit_rows(fleet, "connect", [connected])
    emit_plans(fleet, connected.ledger)
    for version in range(1, num_rounds + 1):
        stage(f"update {version}")

        async def update(version: int = version) -> None:
            report = await controller.update(version)
            check(report, version, fleet)
            phases.append({**report.phases, "plan": report.connect_phases["plan"]})

        updates.append(await Measured.of(ledger, update))
        snapshots.append(await Measured.of(ledger, controller.snapshot_index.settled))
    emit_rows(fleet, "update", updates)
    emit_rows(fleet, "snapshots", snapshots)
    for phase, name in (("connect: plan", "plan"), ("update: verify", "verify")):
        emit(
            {"table": _WHOLE, **fleet, "phase": phase, "s": statistics.median(each[name] for each in phases)}
        )
    await controller.snapshot_index.stop()


def emit_plans(fleet: Mapping[str, object], ledger: Ledger) -> None:
    """Plan the messages of the holders of the first trainer and the first engine rank."""
    terms, table = ledger.shared.get(CrossHostTerms), ledger.shared.get(BundleTable)
    if not isinstance(terms, CrossHostTerms) or not isinstance(table, BundleTable):
        return
    _, rank, sent, _ = ledger.first["exchange"]
    sends = functools.partial(terms.plan, cast("int", rank), cast("Mapping[int, BundleTable]", sent), None)
    receives = functools.partial(terms.plan, terms.hosts[0].ranks[0], {}, table)
    for which, plan in (("sends", sends), ("receives", receives)):
        started = Instant.now()
        plan()
        taken = Instant.now() - started
        tracemalloc.start()
        plan()
        nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        row = {"that": which, "s": taken.wall, "CPU s": taken.cpu, "peak MiB": nbytes / 2**20}
        emit({"table": _HOLDER, **fleet, **row})


def check(report: SyncReport, version: int, fleet: Mapping[str, object]) -> None:
    """Assert that every engine took `version`, by the requested route."""
    assert set(report.engines.values()) == {version}, report.failures
    assert len(report.engines) == fleet["engines"]
    assert {route == "direct" for route in report.routes.values()} == {fleet["mode"] == "direct"}


def emit_rows(fleet: Mapping[str, object], phase: str, rounds: Sequence[Measured]) -> None:
    """Send a row with the medians of `rounds`, and a row per costly method of the last round."""
    whole = [each.row() for each in rounds]
    medians = {name: statistics.median(float(str(row[name])) for row in whole) for name in whole[0]}
    medians["calls"] = int(medians["calls"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    emit({"table": _WHOLE, **fleet, "phase": phase, **medians, "peak MiB": peak})
    for method, cost in rounds[-1].ledger.costs.items():
        mib = (cost.nbytes_out + cost.nbytes_in) / 2**20
        if mib >= 1 or cost.pickling_s >= 0.01:
            row = {"phase": phase, "method": method, "calls": cost.calls}
            row |= {"MiB out": cost.nbytes_out / 2**20, "MiB in": cost.nbytes_in / 2**20}
            emit({"table": _BY_METHOD, **fleet, **row, "pickling s": cost.pickling_s})


class Idle(EngineCalls):
    """An engine's actor that does nothing."""

    def __init__(self) -> None:
        self._engine = RankActors(())


def measure_actors(num_actors: int, num_rounds: int) -> None:
    """Call actors in parallel through Ray and by nodes, in turns, and send a row for each."""
    start_ray(0)
    links = NodeLinks(None)
    peers: dict[str, RemoteEngine] = {}

    async def start() -> None:
        """Start as many actors at once as there are cores, since an actor starts a process."""
        at_once = len(os.sched_getaffinity(0))
        for first in range(0, num_actors, at_once):
            stage(f"start of actor {first}")
            names = [f"engine {number}" for number in range(first, min(first + at_once, num_actors))]
            peers.update({name: remote_engine(name, spawn(Idle, num_threads=1)) for name in names})
            await dialled(links, [peers[name] for name in names])

    async def call() -> Instant:
        started = Instant.now()
        calls = {name: peer.resume(1) for name, peer in peers.items()}
        (await gather_named(calls, "resume", 600.0)).require()
        return Instant.now() - started

    async def rounds() -> dict[str, list[Instant]]:
        await start()
        stage("calls")
        opened = {name: peer.node for name, peer in peers.items()}
        taken: dict[str, list[Instant]] = {"Ray": [], "nodes": []}
        for _ in range(num_rounds + NUM_WARM):
            for way, its in taken.items():
                for name, peer in peers.items():
                    peer.node = None if way == "Ray" else opened[name]
                its.append(await call())
        await links.close()
        return taken

    try:
        for way, taken in asyncio.run(rounds()).items():
            its = taken[NUM_WARM:]
            wall, cpu = (statistics.median(getattr(each, name) for each in its) for name in ("wall", "cpu"))
            row = {"through": way, "actors": num_actors, "rounds": num_rounds, "round ms": wall * 1e3}
            row |= {"ms a call": wall * 1e3 / num_actors, "CPU ms a call": cpu * 1e3 / num_actors}
            emit({"table": _ACTORS, **row})
    finally:
        kill([each.handle for each in peers.values()])


_ACTOR_ROUNDS: Mapping[str, Callable[[int, int], None]] = {
    "engines": measure_actors,
    "trainers": measure_publishing,
}


if __name__ == "__main__":
    _run_part(asked()) if "--part" in sys.argv else main()
