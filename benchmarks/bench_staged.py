"""Counts a real engine's tokens while updates are staged, and times the pauses.

    python -m benchmarks.bench_staged --engine vllm --model 8b [--stage device]
    python -m benchmarks.bench_staged --cpu --engine torch --model tiny     on a CPU, as a smoke test

One engine with dummy weights and one trainer share a GPU. Before an update the trainer gets new weights. The
update goes through the host (``stage="host"``) or on to a second copy on the GPU (``device``), while clients
ask for short completions. Afterwards every element of the engine is compared, untimed. The first two updates
have no clients and are not measured.

  arriving   from the call until engines pause: `publish` and `stage`
  tokens/s   of all clients while a version arrives, and before, without an update; the tokens of a completion
             are spread evenly over the completion's time
  pause      from the first call to pause until the last engine serves: the phases after `stage`. The phase
             `pause` waits for the running step, and `move` copies and verifies
  stopped    the part of the pause after this step, in which no token is made
  copy       the model's bytes from page-locked memory to the GPU, at the rate of a bare copy in the same run
  verify     the slowest rank's digests of live weights
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.cluster import spawn, start_ray
from benchmarks.isolate import asked, emit, measure_engine, stage
from benchmarks.latency_rig import Rig, start
from benchmarks.updates import Round, check, config, new_version, spread
from weightsync import SyncReport

__all__ = ["main"]

_NUM_WARM = 2
_SAMPLING = {"max_tokens": 8, "temperature": 0.0}
_PROMPT = [5, 7, 11, 13]
_COLUMNS = (
    *("arriving ms", "tokens/s", "tokens/s arriving", "share", "pause ms", "pause range", "step ms"),
    *("stopped ms", "move ms", "copy ms", "rank verify ms", "total ms", "GB"),
)


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    if "--part" in sys.argv:
        _run_part(asked())
        return
    measure_engine("benchmarks.bench_staged", _parser().parse_args(), "staged", "staged updates", _COLUMNS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang", "torch"])
    parser.add_argument("--model", default="8b", choices=["1b", "8b", "tiny"])
    parser.add_argument("--stage", default="host", choices=["host", "device"])
    parser.add_argument("--clients", type=int, default=8, help="completions that run at the same time")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds without an update before each one")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU for the engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="on this host instead of a GPU: a smoke test")
    parser.add_argument("--part-timeout", type=float, default=400, help="seconds for everything")
    parser.add_argument("--json", type=Path)
    return parser


def _run_part(spec: Mapping[str, Any]) -> None:
    start_ray(0 if spec["cpu"] else 1)
    try:
        staged = replace(config(256, 2, keep_versions=2), stage=spec["stage"])
        stage("starting the engine and the trainer")
        with start(
            spec["engine"], spec["model"], 1, spec["gpu_memory"], cpu=spec["cpu"], config=staged
        ) as rig:
            stage("connecting")
            rig.connect()
            for _ in range(_NUM_WARM):
                version = _train(rig)
                rig.ours()
                check(rig.wrong(version), "ours", version)
            row = _row([*_rounds(rig, spec)])
            if not spec["cpu"]:
                row["copy ms"] = rig.nbytes / _bare_rate() * 1e3
            emit({**{name: spec[name] for name in ("engine", "model", "stage")}, "copy ms": None, **row})
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class _Staged:
    """One update, and the clients' tokens per second before and while it arrived."""

    round: Round
    idle: float
    arriving: float


def _rounds(rig: Rig, spec: Mapping[str, Any]) -> Iterator[_Staged]:
    for number in range(1, 1 + spec["rounds"]):
        version = _train(rig)
        with _clients(rig.engine, spec["clients"]) as served:
            time.sleep(spec["idle"] / 2)  # until all clients are busy
            idle = time.perf_counter()
            time.sleep(spec["idle"])
            begun = time.perf_counter()
            update = rig.ours()
            time.sleep(spec["idle"] / 4)  # requests that the update had paused come to their end
        arrived = begun + sum(update.report.phases[phase] for phase in ("publish", "stage"))
        found = _Staged(update, served.rate(idle, begun), served.rate(begun, arrived))
        rates = f"{found.idle:.0f} tokens/s, {found.arriving:.0f} while it arrived"
        stage(f"round {number}: {update.seconds * 1e3:.0f} ms, {rates}")
        check(rig.wrong(version), "ours", version)
        yield found


def _train(rig: Rig) -> int:
    """Give the trainer other weights. Returns the version's number."""
    version = new_version()
    ray.get([trainer.change.remote(version) for trainer in rig.trainers])
    return version


@dataclass(slots=True)
class _Served:
    """Begin, end and number of tokens of completions, by the clients' clock."""

    calls: list[tuple[float, float, int]] = field(default_factory=list)

    def rate(self, begin: float, end: float) -> float:
        """Return the tokens per second between two times."""
        inside = (
            (max(0.0, min(end, till) - max(begin, since)), till - since, n) for since, till, n in self.calls
        )
        return sum(overlap / whole * num for overlap, whole, num in inside) / (end - begin)


@contextmanager
def _clients(engine: ActorHandle[Any], num_clients: int) -> Iterator[_Served]:
    """Let clients ask `engine` for completions, one after the other, while the context lasts."""
    served, ending = _Served(), threading.Event()

    def ask(_: int) -> None:
        while not ending.is_set():
            since = time.perf_counter()
            rollout = ray.get(engine.generate.remote([_PROMPT], _SAMPLING), timeout=120)
            served.calls.append((since, time.perf_counter(), len(rollout.tokens[0])))

    with ThreadPoolExecutor(num_clients) as threads:
        asking = threads.map(ask, range(num_clients))
        try:
            yield served
        finally:
            ending.set()
        list(asking)  # raises the first error of a client


def _row(found: Sequence[_Staged]) -> dict[str, object]:
    reports = [each.round.report for each in found]
    idle, arriving = ([getattr(each, name) for each in found] for name in ("idle", "arriving"))
    row = spread("total", [each.round.seconds for each in found])
    row |= spread("arriving", [_seconds(report, ("publish", "stage")) for report in reports])
    row |= spread("pause", [_seconds(report, ("pause", "move", "verify", "commit")) for report in reports])
    row |= spread("stopped", [_seconds(report, ("move", "verify", "commit")) for report in reports])
    for name, phase in {"step": "pause", "move": "move", "commit": "commit"}.items():
        row |= spread(name, [report.phases[phase] for report in reports])
    row |= spread("rank verify", [_rank_verify(report) for report in reports])
    row |= {"tokens/s": statistics.median(idle), "tokens/s samples": idle}
    row |= {"tokens/s arriving": statistics.median(arriving), "tokens/s arriving samples": arriving}
    row["share"] = statistics.median(each.arriving / each.idle for each in found)
    return row | {"GB": reports[0].nbytes / 1e9, "last report": reports[-1].to_dict()}


def _seconds(report: SyncReport, phases: Sequence[str]) -> float:
    return sum(report.phases.get(phase, 0.0) for phase in phases)


def _rank_verify(report: SyncReport) -> float:
    ranks = [spans for name, spans in report.spans.items() if name.startswith("engine ")]
    return max(sum(span.seconds for span in spans if span.name == "verify") for spans in ranks)


class _Bare:
    """An actor that times copies of page-locked memory to the actor's GPU."""

    def rate(self) -> float:
        """Return bytes per second, the median of five copies of 1 GiB."""
        held = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        place, seconds = torch.empty_like(held, device="cuda"), []
        for _ in range(6):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            place.copy_(held, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return len(held) / statistics.median(seconds[1:])


def _bare_rate() -> float:
    rate: float = ray.get(spawn(_Bare, gpu="0").rate.remote(), timeout=120)
    return rate


if __name__ == "__main__":
    main()
