"""Links that are lost without a word, in each phase: who is named when, who goes on, who joins again."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from tests.fleets.actors import Engine, Trainer, until
from tests.hosts.outside import ask, put, say
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.driver.gather import GRACE_S
from weightsync.errors import WeightSyncError
from weightsync.faults import Fault, FaultPlan
from weightsync.report import SyncReport
from weightsync.transports.watchdog import ROLL_CALL_S

TIMEOUT_S = HEARTBEAT_S = patient(0.75)
CONNECT_S = patient(2.5)
CONFIG = SyncConfig(
    bucket_bytes=1 << 20,
    timeout_s=TIMEOUT_S,
    connect_timeout_s=CONNECT_S,
    heartbeat_s=HEARTBEAT_S,
    heal_backoff_s=0.1,
    refill="zeromq",
)
WIDTH = 1024
OTHERS = ("west", "east")
FOREVER_S = 3600.0  # until the scenario mends the link
PHASE_S = TIMEOUT_S + GRACE_S
DEAD = EngineState.DEAD
SLACK_S = patient(1)  # a busy machine's


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """A checksum of all bytes, in the order of names."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), total)
    return total


class Witness(Engine):
    """Notes, again and again, which bytes it serves under which version, also while nobody reaches it."""

    def __init__(self, width: int, name: str, slot: str) -> None:
        super().__init__(width, name, slot)
        self._seen = set[tuple[int, int]]()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            before = self._serves()
            found = checksum(self._engine.tensors)
            if before and before == self._serves():
                self._seen.add((before, found))
            time.sleep(0.02)

    def _serves(self) -> int:
        return 0 if self._engine.paused else self._engine.version

    async def seen(self) -> set[tuple[int, int]]:
        return set(self._seen)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Fleet:
    """A trainer on the first host, and an engine with a witness on each other."""

    def __init__(self, config: SyncConfig = CONFIG, trainer: type[Trainer] = Trainer) -> None:
        self.trainer = put("head", trainer, WIDTH, "t")
        self.sync = WeightSync(config)
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines({name: self.engine(name) for name in OTHERS})
        self.published: dict[int, int] = {}
        self.log = Lines()
        logging.getLogger("weightsync").addHandler(self.log)
        self.sync.connect()
        self.bring(OTHERS)

    @staticmethod
    def engine(name: str) -> Any:
        """Start an engine on the host `name`."""
        engine = put(name, Witness, WIDTH, name, name)
        ray.get(engine.seen.remote())  # it takes long to start
        return engine

    def update(self) -> SyncReport | WeightSyncError:
        """Bring the next version. Returns the error if that raises."""
        version = max(self.published, default=0) + 1
        ray.get(self.trainer.train.remote(version))
        self.published[version] = checksum(ray.get(self.trainer.weights.remote()))
        try:
            return self.sync.update_weights(version)
        except WeightSyncError as error:
            return error

    def refill(self, name: str) -> str:
        """Update, in which `name` fails, until it is healed or found DEAD. Returns what is said of it."""
        self.update()
        return self.wait(name, EngineState.SERVING, EngineState.DEAD)

    def wait(self, name: str, *states: EngineState) -> str:
        """Wait until engine `name` is in one of `states`. Returns who is said not to have answered."""
        assert until(lambda: self.sync.engine_states()[name] in states, patient(15)), self.log.lines
        if self.sync.engine_states()[name] is DEAD:
            assert until(lambda: any("is given up" in line for line in self.log.lines), patient(15))
        return "\n".join(line for line in self.log.lines if "no answer" in line)

    def connect(self) -> WeightSyncError | None:
        """Connect again. Returns the error if that raises."""
        try:
            self.sync.connect()
        except WeightSyncError as error:
            return error
        return None

    def serves(self, name: str) -> bool:
        """Whether an engine serves the committed version."""
        return self.sync.version > 0 and self.sync.engine_versions()[name] == self.sync.version

    def holder(self, name: str) -> str:
        """The name of the holder of engine `name`."""
        return f"holder {dict(self.sync.plan.members.engines)[name][0]}"

    def processes(self, name: str) -> set[str]:
        """The names of the processes on the host of engine `name`."""
        return {f"engine {name}", self.holder(name)}

    def bring(self, names: Sequence[str]) -> None:
        """Update until all of `names` serve the newest version."""
        errors: list[object] = []

        def all_serve() -> bool:
            outcome = self.update()
            if isinstance(outcome, WeightSyncError):
                errors.append(outcome)
            return isinstance(outcome, SyncReport) and all(map(self.serves, names))

        assert until(all_serve, patient(15)), (names, self.sync.engine_states(), errors)

    def check(self) -> None:
        """Check that no engine ever served bytes that were not its version's, and each serves some."""
        for name, engine in self.sync.engines().items():
            serves = self.sync.engine_versions()[name]
            assert until(lambda: serves in dict(ray.get(engine.seen.remote())), patient(5)), name  # noqa: B023
            for version, found in ray.get(engine.seen.remote()):
                assert self.published[version] == found, f"engine {name} served other bytes as {version}"


@dataclass(frozen=True)
class Case:
    """A link that is cut at one place, and what is to come of it.

    Attributes:
        faults: the faults of a fleet; the last one cuts the link.
        limit_s: what the deadlines allow from the cut until the call says what was lost.
        link: the link that is mended after the others have gone on. Empty if it comes back by itself.
        act: what is called.
        loses: the hosts of which the error or the report names a process, and no process of another.
        raises: whether the call does. Otherwise it commits on the others.
    """

    name: str
    faults: Callable[[Fleet], Sequence[Fault]]
    limit_s: float
    link: str = "west"
    act: Callable[[Fleet], SyncReport | WeightSyncError | str | None] = Fleet.update
    loses: Sequence[str] = ("west",)
    raises: bool = False


def cut(process: str, at: Any, seconds: float = FOREVER_S, **more: Any) -> Fault:
    """Return the fault that cuts the link of the process's host, unless `link` names another."""
    return Fault(process=process, action="link_down", at=at, seconds=seconds, **more)


def failing(name: str, fault: Fault) -> Sequence[Fault]:
    """Have an engine fail once, so that it is refilled, with `fault` at that."""
    return Fault(process=f"engine {name}", action="error", at="verify"), fault


CASES = (
    Case(
        "idle", lambda _: [cut("engine west", "idle")], 2 * HEARTBEAT_S, act=lambda it: it.wait("west", DEAD)
    ),
    Case("publish", lambda _: [cut("trainer 0", "publish", link="west")], 2 * PHASE_S, raises=True),
    Case("pause", lambda _: [cut("engine west", "pause")], 2 * PHASE_S, raises=True),
    Case(
        "move",
        lambda it: [cut(it.holder("west"), "move", bucket="middle")],
        2 * PHASE_S + ROLL_CALL_S,
        raises=True,
    ),
    Case(
        "move, from the trainer's",
        lambda it: [cut(it.holder("west"), "move", link="west/head", bucket="middle")],
        2 * PHASE_S + ROLL_CALL_S,
        link="west/head",
        raises=True,
    ),
    Case("verify, back by itself", lambda _: [cut("engine west", "verify", 2.5 * PHASE_S)], PHASE_S, link=""),
    Case("commit", lambda _: [cut("engine west", "commit")], PHASE_S),
    Case(
        "refill",
        lambda it: failing("west", cut(it.holder("west"), "refill", bucket="middle")),
        CONNECT_S + 2 * GRACE_S,
        act=lambda it: it.refill("west"),
    ),
    Case(
        "connect",
        lambda _: [cut("engine west", "connect")],
        CONNECT_S + GRACE_S,
        act=Fleet.connect,
        raises=True,
    ),
    Case(
        "move, for a second",
        lambda it: [cut(it.holder("west"), "move", 1.0, bucket="middle")],
        PHASE_S,
        link="",
        loses=(),
    ),
    Case(
        "move, between two",
        lambda it: [cut(it.holder("west"), "move", link="west/east", bucket="middle")],
        PHASE_S,
        link="west/east",
        loses=(),
    ),
    Case(
        "refill, between two",
        lambda it: failing("east", cut(it.holder("east"), "refill", link="west/east", bucket="middle")),
        PHASE_S,
        link="west/east",
        act=lambda it: it.refill("east"),
        loses=(),
    ),
    Case(
        "connect, between two",
        lambda it: [cut(it.holder("west"), "connect", link="west/east")],
        CONNECT_S + GRACE_S,
        link="west/east",
        act=Fleet.connect,
        loses=OTHERS,
        raises=True,
    ),
)


def suffer(fleet: Fleet, case: Case) -> str:
    """Cut a link. Returns a line of the table: the seconds until what was noticed and mended."""
    fleet.bring(OTHERS)
    fleet.sync.settle(patient(20))
    lost, kept = set[str](), {"trainer 0", "holder 0"}
    for name in OTHERS:
        (lost if name in case.loses else kept).update(fleet.processes(name))
    fleet.log.lines.clear()
    fleet.sync.inject(FaultPlan(tuple(case.faults(fleet))))
    outcome = case.act(fleet)
    noticed_s = since_cut()
    states = {name: state.value for name, state in fleet.sync.engine_states().items()}
    say(f"{noticed_s:.1f} s: {type(outcome).__name__} {outcome}, {states}")
    said = str(outcome.failures if isinstance(outcome, SyncReport) else outcome)
    assert isinstance(outcome, WeightSyncError) == case.raises, said
    assert any(name in said for name in lost) == bool(lost), (said, lost)
    told = said.partition("(the ranks are")[0]
    assert not any(name in told for name in kept), (said, kept)
    assert noticed_s < case.limit_s + SLACK_S
    left_out = None
    if not (others := [name for name in OTHERS if name not in case.loses]):
        left_out, others = fleet.sync.engines()["west"], ["east"]
        fleet.sync.remove_engine("west")  # nobody else can say which of the two goes on
    fleet.bring(others)
    others_s = since_cut()
    if case.link:
        ask("mend", case.link)
    mended = time.monotonic()
    if left_out:
        fleet.sync.add_engine("west", left_out)
    if not until(lambda: all(map(fleet.serves, OTHERS)), patient(10)):
        raise AssertionError(f"not healed: {fleet.sync.engine_states()}")
    again_s = time.monotonic() - mended
    fleet.check()
    fleet.bring(OTHERS)
    fleet.check()
    return f"{case.name:24} {case.limit_s:5.1f} {noticed_s:8.1f} {others_s:8.1f} {again_s:8.1f}"


def since_cut() -> float:
    """Seconds since the last link was cut."""
    return time.monotonic() - ask("cut_at", "") / 1e3


def lost_links() -> None:
    """Cut the link of one engine's host in each phase."""
    fleet, lines, failed = Fleet(), list[str](), list[str]()
    for case in CASES:
        say("==", case.name)
        try:
            lines.append(suffer(fleet, case))
            say(lines[-1])
        except (AssertionError, WeightSyncError):
            failed.append(f"{case.name}: {traceback.format_exc()}")
            say(failed[-1])
            ask("mend", case.link or "west")
    for name in OTHERS:  # those that were given up ended, once they were reached
        assert until(lambda name=name: ask("count", name, "Holder") == 1, patient(10)), name
    fleet.sync.close()
    say(f"{'link lost in':24} {'limit':>5} {'noticed':>8} {'others':>8} {'again':>8}", *lines, sep="\n")
    assert not failed, failed


def hasty_ray() -> None:
    """Cut a link until Ray declares the host dead: it comes back as another node."""
    fleet = Fleet()
    fleet.sync.settle(patient(20))
    (node,) = {each["NodeID"] for each in ray.nodes() if "west" in each["Resources"]}
    fleet.sync.inject(FaultPlan((cut("engine west", "commit"),)))
    outcome = fleet.update()
    assert isinstance(outcome, SyncReport)
    say(f"update {since_cut():.1f} s: {outcome.failures}")
    assert "engine west" in outcome.failures["west"]
    fleet.bring(["east"])
    say(f"others {since_cut():.1f} s")
    assert until(
        lambda: not any(each["Alive"] and each["NodeID"] == node for each in ray.nodes()), patient(15)
    )
    say(f"dead {since_cut():.1f} s")
    fleet.bring(["east"])
    ask("mend", "west")
    mended = time.monotonic()
    assert until(lambda: ask("count", "west", "raylet/raylet") == 0, patient(20)), (
        "Ray ends what it declared dead"
    )
    say(f"ended {time.monotonic() - mended:.1f} s after the link was back")
    ask("ray", "west")
    fleet.sync.add_engine("west", fleet.engine("west"))
    fleet.bring(OTHERS)
    say(f"again {time.monotonic() - mended:.1f} s after the link was back")
    fleet.check()
    fleet.sync.close()
