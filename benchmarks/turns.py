"""Our fleet and another system's: one update each, round after round, in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from benchmarks.gpu_fleet import Fleet
from benchmarks.isolate import stage
from benchmarks.updates import (
    Mode,
    Round,
    check,
    config,
    connect,
    floor,
    new_version,
    timed_rounds,
    update_row,
)
from weightsync import WeightSync
from weightsync.errors import WeightSyncError

__all__ = ["NUM_WARM", "Peer", "connected", "in_turns", "setting"]

NUM_WARM = 2


class Peer(Protocol):
    """Another system's fleet, with memory of its own."""

    def prepare(self, version: int) -> None:
        """The source holds `version`, the destination nothing that is right."""

    def update(self) -> dict[str, float]:
        """Seconds of its phases."""

    def wrong(self, version: int) -> int:
        """Elements of the destination that differ from `version`."""


def connected(fleet: Fleet, bucket_mib: int, mode: Mode, slots: int) -> WeightSync:
    """Ours, ready to update `fleet`."""
    sync = WeightSync(config(bucket_mib, slots, mode))
    sync.register_trainers(fleet.trainers)
    sync.register_engines({"engine": fleet.front})
    connect(sync)
    return sync


def setting(mode: Mode, slots: int) -> dict[str, object]:
    """What a row says of how ours was connected."""
    return {"mode": mode, "slots": slots}


def in_turns(
    fleet: Fleet, peer: Peer, spec: Mapping[str, Any], *, on_gpus: bool = True
) -> tuple[dict[str, object], list[dict[str, float]]]:
    """Our row, empty if we did not get through, and the peer's seconds in each of ``spec["rounds"]``."""
    ours: list[Round] = []
    theirs: list[dict[str, float]] = []
    row: dict[str, object] = {}
    for _ in range(NUM_WARM):
        _their_round(peer)
    try:
        with connected(fleet, spec["bucket_mib"], *spec["settings"][0]) as sync:
            for each in timed_rounds(sync, fleet, spec["rounds"], NUM_WARM):
                ours.append(each)
                theirs.append(_their_round(peer))
            row = setting(*spec["settings"][0]) | update_row(ours)
            row |= floor(sync.links(), ours) if on_gpus else {}
    except WeightSyncError as error:
        print(f"ours: given up after {len(ours)} rounds: {error}", flush=True)
    theirs += [_their_round(peer) for _ in range(spec["rounds"] - len(theirs))]
    return row, theirs


def _their_round(peer: Peer) -> dict[str, float]:
    version = new_version()
    stage("the other's round")
    peer.prepare(version)
    seconds = peer.update()
    check(peer.wrong(version), "the other", version)
    return seconds
