"""Finds out before the plan which engines can read the trainers' memory directly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync.config import SyncConfig
from weightsync.driver.connecting.ways import obstacle
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.plan import MAPPED
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.handles import DeviceHandle


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial.

    Attributes:
        obstacles: by engine, why it may not read directly, as `obstacle` says; "" if it may.
        failures: of the engines that were tried, why holders cannot map the memory.
    """

    obstacles: Mapping[str, str]
    failures: Mapping[str, str]


async def run_trial(
    fleet: Fleet,
    config: SyncConfig,
    trainers: Sequence[LayoutTable],
    engines: Mapping[str, Sequence[LayoutTable]],
    demoted: Mapping[str, str],
) -> Trial:
    """Have holders map trainers' memory, for engines that nothing else keeps from it.

    No process is called if there is no such engine. Raises DeadlineError with the names of members that did
    not answer within ``config.connect_timeout_s``, and the errors of lost members.

    Args:
        trainers: the layouts of the trainer ranks.
        engines: the layouts of each engine's ranks.
        demoted: see `Router`.
    """
    trainers_export = _on_device(trainers)
    exports = {
        name: _on_device(ranks) and all(rank.buffers for rank in ranks) for name, ranks in engines.items()
    }

    def obstacles(failures: Mapping[str, str]) -> dict[str, str]:
        return {
            name: obstacle(
                config,
                demoted.get(name, ""),
                failures.get(name, ""),
                trainers_export,
                exports[name],
                ranks[0].converts,
            )
            for name, ranks in engines.items()
        }

    timeout_s = config.connect_timeout_s
    calls = {
        f"engine {name}": fleet.engines[name].peer.can_export()
        for name, reason in obstacles({}).items()
        if not reason
    }
    answers = (await gather_named(calls, "trial", timeout_s)).require()
    exports |= {name.removeprefix("engine "): all(ranks) for name, ranks in answers.items()}
    open_to = [name for name, reason in obstacles({}).items() if not reason]
    failures = await _try_mappings(fleet, open_to, timeout_s) if open_to else {}
    return Trial(obstacles(failures), failures)


def _on_device(ranks: Iterable[LayoutTable]) -> bool:
    return all(rank.device not in ("", MAPPED) for rank in ranks)


async def _try_mappings(fleet: Fleet, engines: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Return per engine why holders cannot map the trainers' memory, "" if they can.

    If a trainer's holder fails, that counts for all engines: nobody can read unmapped memory in place.
    """
    asked = {f"trainer {rank}": trainer.trial_handle() for rank, (trainer, _) in enumerate(fleet.trainers)}
    handles = (await gather_named(asked, "trial", timeout_s)).require()
    memory = _memory(fleet, {name: handle for name, handle in handles.items() if handle}, engines)
    calls = {f"holder {holder}": fleet.holders[holder].try_mapping(held) for holder, held in memory.items()}
    reasons = (await gather_named(calls, "trial", timeout_s)).require()
    senders = {holder for _, holder in fleet.trainers}
    needed = {name: sorted(senders.union(fleet.engines[name].holders)) for name in engines}
    return {
        name: next((reason for i in holders if (reason := reasons[f"holder {i}"])), "")
        for name, holders in needed.items()
    }


def _memory(
    fleet: Fleet, handles: Mapping[str, DeviceHandle], engines: Sequence[str]
) -> dict[int, dict[str, DeviceHandle]]:
    """Return the memory that each holder has to map, by trainer.

    A trainer's holder maps the memory of this trainer. An engine's holder maps the memory of all trainers on
    the same host.
    """
    readers = {holder for name in engines for holder in fleet.engines[name].holders}
    by_host: defaultdict[str, set[int]] = defaultdict(set)
    for holder in readers:
        by_host[fleet.node(holder)].add(holder)
    memory: dict[int, dict[str, DeviceHandle]] = {holder: {} for holder in sorted(readers)}
    for rank, (_, own) in enumerate(fleet.trainers):
        handle = handles.get(f"trainer {rank}")
        for holder in {own} | by_host[fleet.node(own)]:
            held = memory.setdefault(holder, {})
            if handle:
                held[f"trainer {rank}"] = handle
    return memory
