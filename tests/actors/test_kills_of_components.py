"""A process that ends in any phase of an update of a model, its draft and an adapter: none half commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from tests.fleets.actors import spawn, until
from tests.fleets.faulty import Faulty, end, healthy, process_state
from tests.patience import patient
from weightsync import SyncReport
from weightsync.faults import Fault

pytestmark = pytest.mark.timeout(120)
TOWER = "up.weight"
"""It stands for a part of the model that trainers freeze, or not."""


@dataclass(frozen=True)
class Parts:
    """How an update covers what engines serve."""

    tower: Literal["covered", "frozen"]
    draft: Literal["trained", "frozen"]
    adapter: bool

    def __str__(self) -> str:
        return f"tower_{self.tower}-draft_{self.draft}" + "-adapter" * self.adapter


class Components(Faulty):
    """Trainer 0 has the model. Trainer 1 has the draft or, if that is frozen, the model, too."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        super().__init__(components={"draft": parts.draft})
        self.first_draft = self.draft_of("e0")
        self.adapted: dict[int, Any] = {}
        if parts.adapter:
            self.adapting = self._start("adapter", "adapter")
            self.sync.register_adapter("math", [self.adapting])

    def start_trainer(self, rank: int) -> Any:
        trains_draft = rank == 1 and self.parts.draft == "trained"
        return self._start("draft" if trains_draft else "model", self.slot(rank))

    def _start(self, part: str, slot: str) -> Any:
        from tests.fleets.component_actors import ComponentTrainer

        frozen = [TOWER] if part == "model" and self.parts.tower == "frozen" else []
        return spawn(ComponentTrainer, slot, part, frozen)

    def start_engine(self, name: str) -> Any:
        from tests.fleets.component_actors import ServingActor

        return spawn(ServingActor, name, self.slot(name))

    def move(self) -> SyncReport:
        if not self.parts.adapter:
            return super().move()
        ray.get(self.adapting.train.remote(self.version))
        self.adapted[self.version] = ray.get(self.adapting.weights.remote())
        return self.sync.update_weights(self.version, components=["model", "adapter math"])

    def close(self) -> None:
        super().close()
        if self.parts.adapter:
            ray.kill(self.adapting)

    def draft_of(self, engine: str) -> dict[str, torch.Tensor]:
        weights = ray.get(self.sync.engines()[engine].weights.remote(), timeout=patient(5))
        return {name: each for name, each in weights.items() if name.startswith("draft/")}

    def check(self) -> None:
        """As for all fleets, and what else an engine serves is of one version, too."""
        assert until(self._is_checked, patient(20)), "engines end again and again"

    def _is_checked(self) -> bool:
        try:
            self._check()
        except RayActorError:  # one ended while it was asked, as in a refill of its adapter
            return False
        return True

    def _check(self) -> None:
        super().check()
        for name, handle in self.sync.serving().items():
            if self.parts.draft == "frozen":
                assert self._equal(self.first_draft, self.draft_of(name)), name
            version, held = ray.get(handle.adapter.remote(), timeout=patient(5))
            if version:
                assert version in self.committed
                assert self._equal(self.adapted[version], held), name

    def check_all(self) -> None:
        """Every engine serves the newest bytes of every component."""
        self.check()
        wanted = {"model", "draft"} | ({"adapter math"} if self.parts.adapter else set())
        rows = {(row.engine, row.component, row.version) for row in self.sync.coverage()}
        assert rows == {(engine, part, self.version) for engine in ("e0", "e1") for part in wanted}
        if self.parts.adapter:
            served = [ray.get(each.adapter.remote())[0] for each in self.sync.engines().values()]
            assert served == [self.version] * 2

    def _equal(self, wanted: Any, found: Any) -> bool:
        return wanted.keys() == found.keys() and all(
            torch.equal(wanted[each], found[each]) for each in wanted
        )


@dataclass(frozen=True)
class Kill:
    """A process that ends at a place, or raises an error there, of the version that is made."""

    process: str
    at: Any
    bucket: Any = None
    action: Literal["kill", "error"] = "kill"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.process.replace(" ", ""), self.at, self.bucket, self.action)))


KILLS = [
    Kill("engine e1", "pause"),
    *(Kill("engine e1", "move", bucket) for bucket in ("first", "middle", "last")),
    Kill("engine e1", "verify"),
    Kill("engine e1", "verify", action="error"),
    Kill("engine e1", "commit"),
    Kill("engine e1", "commit", action="error"),
    Kill("engine e0", "verify"),
    *(Kill("engine e1", "refill", bucket) for bucket in ("first", "last")),
    *(Kill(f"trainer {rank}", "publish") for rank in (0, 1)),
    *(Kill(f"holder {rank}", "move", "middle") for rank in (0, 1, 2)),
    *(Kill(f"holder {rank}", "commit") for rank in (0, 1)),
]
ALL = Parts("covered", "trained", adapter=True)
EVERY = [
    Parts(tower, draft, adapter)
    for tower in ("covered", "frozen")
    for draft in ("trained", "frozen")
    for adapter in (False, True)
]
PRODUCT = [
    (parts, kill)
    for parts in EVERY
    for kill in KILLS
    # The last bucket has the frozen tower, and does not move again.
    if not (parts.tower == "frozen" and (kill.at, kill.bucket) == ("move", "last"))
]
FEW = [Kill("engine e1", "move", "last"), Kill("engine e1", "commit"), Kill("trainer 1", "publish")]


@pytest.fixture(scope="module")
def fleets(cluster: None) -> Iterator[dict[Parts, Components]]:
    """A fleet for each combination, as long as it survives."""
    made: dict[Parts, Components] = {}
    yield made
    for fleet in made.values():
        fleet.close()


@pytest.mark.parametrize("kill", FEW, ids=str)
def test_what_ends_in_an_update_leaves_no_half_of_it(fleets: dict[Parts, Components], kill: Kill) -> None:
    _survive(fleets, ALL, kill)


@pytest.mark.faults
@pytest.mark.parametrize(("parts", "kill"), PRODUCT, ids=str)
def test_what_ends_anywhere_leaves_no_half_of_an_update(
    fleets: dict[Parts, Components], parts: Parts, kill: Kill
) -> None:
    _survive(fleets, parts, kill)


def _survive(fleets: dict[Parts, Components], parts: Parts, kill: Kill) -> None:
    for other in [each for each in fleets if each != parts]:  # a fleet at a time: each has eight processes
        fleets.pop(other).close()
    fleet = fleets.pop(parts, None) or Components(parts)
    try:
        _suffer(fleet, kill)
    except BaseException:
        fleet.close()
        raise
    fleets[parts] = fleet


def _suffer(fleet: Components, kill: Kill) -> None:
    fleet.update_all()
    fleet.settle()
    fleet.check_all()
    fleet.log.clear()
    before, victim = fleet.version, fleet.pid(kill.process)
    fault = Fault(process=kill.process, action=kill.action, at=kill.at, bucket=kill.bucket)
    failing = Fault(process=kill.process, action="error", at="verify")
    fleet.inject(*([failing] if kill.at == "refill" else []), fault)
    outcome = fleet.update()
    fleet.check()
    if isinstance(outcome, SyncReport):
        assert kill.process.startswith("engine") or kill.at == "commit"
    else:
        assert fleet.sync.version == before
        assert kill.process in str(outcome)
        assert not kill.process.startswith("engine")
    if kill.action == "kill":
        assert until(lambda: process_state(victim) in ("", "stopped"), patient(20))
    # A holder that replaced another one calls itself by a number of its own.
    is_kept = kill.process.startswith("holder") and kill.at == "commit"
    named = "a snapshot is missing: holder" if is_kept else kill.process
    assert until(lambda: named in fleet.log.text(), patient(20)), fleet.log.text()
    fleet.settle()
    if kill.process.startswith("trainer"):
        end(victim)
        fleet.replace_trainers()
    fleet.update_all()
    fleet.settle()
    assert healthy(fleet)
    fleet.check_all()
