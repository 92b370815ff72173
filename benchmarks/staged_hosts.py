"""Staged updates between two hosts, as deltas and whole, for `bench_hosts`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from benchmarks.isolate import stage
from benchmarks.latency_rig import Rig
from benchmarks.updates import Round, check, config, connect, new_version, spread
from weightsync import SyncConfig

__all__ = ["COLUMNS", "rows", "settings"]

COLUMNS = (
    *("engine", "changed %", "way", "total ms", "total range", "stage ms", "pause ms", "pause range"),
    *("sockets GB", "sent GB", "GB"),
)
_PAUSE = ("pause", "move", "verify", "commit")


def settings(bucket_mib: int, deltas: Literal["auto", "always"]) -> SyncConfig:
    """Return the config of staged updates. Mirrors would send a copy of each version back.

    An engine on a CPU does not answer while its elements are compared.
    """
    two = config(bucket_mib, 2, keep_versions=2)
    return replace(two, stage="auto", deltas=deltas, mirrors=0, timeout_s=240, heartbeat_s=240)


def rows(
    rig: Rig, changed: Sequence[float], num_rounds: int, received: Callable[[], int]
) -> Iterator[dict[str, object]]:
    """Yield a row for the first version, for each of `changed`, in percent, and for whole versions.

    Greater deltas come first. The first one allocates memory for all, and is left out. If ``deltas="auto"``
    does not choose it, no others are tried. At the end deltas of whole versions are made in vain, with
    ``auto`` only once: the first version has no such delta.
    """
    rig.sync.register_trainers(rig.trainers)
    rig.sync.register_engines({rig.kind: rig.engine})
    connect(rig.sync)
    history = _History(rig, received)
    yield {"changed %": "100, first", **_row([history.update(100.0)])}
    history.update(max(changed))
    for percent in (*sorted(changed, reverse=True), 100.0):
        yield {"changed %": percent, **_row([history.update(percent) for _ in range(num_rounds)])}


class _History:
    """Updates. Each update changes a fraction of the previous version."""

    def __init__(self, rig: Rig, received: Callable[[], int]) -> None:
        self._rig, self._received = rig, received
        self._filled, self._touched = 0, dict[int, float]()

    def update(self, percent: float) -> tuple[Round, int]:
        """Change so many elements, update, and compare all. Returns the round and the sockets' bytes."""
        version, fraction = new_version(), percent / 100
        if fraction == 1.0:
            self._filled, self._touched = version, {}
        else:
            self._touched[version] = fraction
        self._rig.prepare(version, fraction)
        before = self._received()
        done = self._rig.ours()
        sockets = self._received() - before
        check(self._rig.wrong(self._filled, self._touched), f"{percent:g} %", version)
        stage(f"{percent:g} % changed: {done.seconds:.2f} s, {_way(done)}, {sockets / 1e9:.3g} GB")
        return done, sockets


def _row(rounds: Sequence[tuple[Round, int]]) -> dict[str, object]:
    done, sockets = zip(*rounds, strict=True)
    reports = [each.report for each in done]
    row = spread("total", [each.seconds for each in done])
    row |= spread("stage", [report.phases["stage"] for report in reports])
    row |= spread("pause", [sum(report.phases.get(name, 0.0) for name in _PAUSE) for report in reports])
    row["way"] = ", ".join(sorted({_way(each) for each in done}))
    row["sockets GB"] = statistics.median(sockets) / 1e9
    row["sent GB"] = statistics.median(sum(report.bytes_from.values()) for report in reports) / 1e9
    return row | {"GB": reports[0].nbytes / 1e9, "last report": reports[-1].to_dict()}


def _way(done: Round) -> str:
    """Return how parts came, such as ``zeromq, delta``."""
    ways = " and ".join(sorted(set(done.report.ways.values())))
    if "mapped" in ways:
        raise RuntimeError(f"parts came {ways}: holders of the two nodes share memory")
    return ways
