"""Deltas between hosts: seconds and bytes beside whole versions, and what is lost in each phase of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray
import torch

from tests.fleets.actors import Engine, Trainer
from tests.hosts import lost_links
from tests.hosts.lost_links import OTHERS, Case, Fleet, cut, suffer
from tests.hosts.outside import ask, put, say
from tests.patience import patient
from weightsync import SyncConfig, SyncReport, WeightSync
from weightsync.faults import Fault, FaultPlan

MBIT_PER_S = 1000
WIDTHS = 1024, 10_000
"""Of models of 4 and 400 MB."""
FRACTIONS = 0.01, 0.05, 0.3


class Tuned(Trainer):
    """Changes a fraction of its weights in each step, 2 % by default."""

    fraction = 0.02

    def train(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += (torch.rand_like(parameter) < self.fraction).to(parameter.dtype)

    def tune(self, fraction: float) -> None:
        self.fraction = fraction


def deltas() -> None:
    """At 1 Gb/s: whole versions, then what `auto` chooses for 1, 5 and 30 % of changed elements."""
    for name in OTHERS:
        ask("rate", name, MBIT_PER_S)
    for width in WIDTHS:
        _compare(width)
    _lose()


def _compare(width: int) -> None:
    config = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60), mirrors=0, refill="zeromq")
    config = replace(config, stage="host", deltas="auto")
    with WeightSync(config) as sync:
        trainer = put("head", Tuned, width, "t")
        sync.register_trainers([trainer])
        sync.register_engines({name: put(name, Engine, width, name, name) for name in OTHERS})
        sync.connect()
        sync.settle(patient(60))
        whole_s, whole = _updated(sync, trainer, 1, 1.0)
        for version, fraction in enumerate(FRACTIONS, 2):
            seconds, nbytes = _updated(sync, trainer, version, fraction)
            say(
                f"{whole / 2e6:.0f} MB, {fraction:.0%} changed: {nbytes / 2e6:.1f} MB a host, staged in "
                f"{seconds:.2f} s; whole {whole_s:.2f} s"
            )
            if width == max(WIDTHS):
                assert nbytes < (1.5 * fraction + 0.05) * whole
                assert seconds < whole_s
        trainer_holds = ray.get(trainer.weights.remote())
        for name in OTHERS:
            held = ray.get(sync.engines()[name].weights.remote())
            assert all(torch.equal(tensor, trainer_holds[key]) for key, tensor in held.items()), name
    ray.kill(trainer)


def _updated(
    sync: WeightSync, trainer: ray.actor.ActorHandle, version: int, fraction: float
) -> tuple[float, int]:
    """Bring a version in which a fraction changed. Returns seconds and bytes of staging."""
    ray.get(trainer.tune.remote(fraction))
    ray.get(trainer.train.remote(version))
    before = sum(ask("nbytes", name) for name in OTHERS)
    report = sync.update_weights(version)
    sync.settle(patient(60))
    crossed = sum(ask("nbytes", name) for name in OTHERS) - before
    say(f"version {version}: {dict(report.bytes_from)} {dict(report.ways)}, {crossed} crossed")
    assert crossed < 1.3 * sum(report.bytes_from.values()) + (1 << 20)
    return report.phases["stage"], sum(report.bytes_from.values())


def _staging(fleet: Fleet) -> Sequence[Fault]:
    return [cut(fleet.holder("west"), "stage")]


CASES = (
    Case(
        "made, then cut",
        lambda _: [cut("holder 0", "stage", link="west")],
        2 * lost_links.PHASE_S,
        raises=True,
    ),
    Case("applied, then cut", _staging, 2 * lost_links.PHASE_S, raises=True),
)


def _lose() -> None:
    """Cut a link before and after a delta crosses it, then kill the holder that has applied one."""
    config = replace(lost_links.CONFIG, stage="host", deltas="always")
    fleet = Fleet(config, Tuned)
    for case in CASES:
        say("==", case.name)
        say(suffer(fleet, case))
    fleet.sync.inject(FaultPlan((Fault(process=fleet.holder("west"), action="kill", at="stage"),)))
    say("killed:", fleet.update())
    fleet.bring(OTHERS)
    fleet.check()
    outcome = fleet.update()
    assert isinstance(outcome, SyncReport)
    assert {*outcome.ways.values()} == {"zeromq, delta"}
    fleet.sync.close()
