"""Staged updates in which hosts get only what changed since the committed version."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

import pytest
import torch

from tests.fleets.loop import CONFIG, Loop, drive
from tests.pages import run_block
from weightsync import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PeerError, ReadError, TransportError, WeightSyncError
from weightsync.holder.snapshots import HEADER_NBYTES
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.messages import StagedPart, StageTask
from weightsync.protocol.timing import seconds_of

DELTAS = replace(CONFIG, stage="host", deltas="always")
NUM_ELEMENTS = 40 * 30 + 30 + 30 * 5 + 5


class Apart(Loop):
    """A loop with each holder on its own host. Training changes a few elements."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.fleet.nodes[:] = [f"host {i}" for i in range(len(self.holders))]
        self.tasks: list[StageTask] = []
        whole = self.holders[1].stage

        def stage(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
            self.tasks.append(task)
            return whole(task, timeout_s)

        self.holders[1].stage = stage  # type: ignore[method-assign]

    def nudge(self, num: int = 12) -> None:
        with torch.no_grad():
            flat = next(self.model.parameters()).view(-1)
            flat[torch.randperm(len(flat))[:num]] += 1

    def holds(self) -> bool:
        return self.holds_the_models_weights("e0") and self.holds_the_models_weights("e1")


def drive_apart(
    work: Callable[[Apart], Coroutine[object, object, None]], config: SyncConfig = DELTAS
) -> None:
    def whole(loop: Loop) -> Coroutine[object, object, None]:
        assert isinstance(loop, Apart)
        return work(loop)

    drive(whole, config, Apart)


def after_saving(loop: Loop, act: Callable[[StagedPart], None]) -> Callable[[], None]:
    """Call `act` with what the trainer's holder has staged. Returns a function that undoes it."""
    whole = loop.holders[0].stage

    def stage(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
        done = whole(task, timeout_s)
        act(done[0])
        return done

    def undo() -> None:
        loop.holders[0].stage = whole  # type: ignore[method-assign]

    loop.holders[0].stage = stage  # type: ignore[method-assign]
    return undo


def flip(at: int) -> Callable[[StagedPart], None]:
    """Return what flips a bit of the delta's byte `at`, after the header."""

    def act(saved: StagedPart) -> None:
        assert saved.delta
        assert saved.delta.offer
        memory = SharedBuffer.open(saved.delta.offer.memory)
        memory.tensor[HEADER_NBYTES + at] ^= 1
        memory.close()

    return act


def test_hosts_get_what_changed_and_engines_hold_the_version() -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in range(1, 7):
            loop.nudge(12 if version < 5 else 0)
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds()
            few = version > 1
            assert report.ways == {"holder 0": "mapped, delta" if few else "mapped"}
            assert (report.bytes_from["holder 0"] < 4 * NUM_ELEMENTS) == few
            assert [span.name for span in report.spans["holder 0"]] == ["save", *["delta"][:few]]
            assert [span.name for span in report.spans["holder 1"]] == ["copy", "digest"]
        saved = loop.tasks[-1].deltas[0]
        assert saved.base == 5
        assert saved.nbytes < 100, "nothing changed"

    drive_apart(work)


def test_with_the_pages_settings_a_link_is_measured_and_then_decided() -> None:
    page: SyncConfig = run_block("docs/deltas.md", 0)["config"]

    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.nudge()
            await loop.controller.update(version)
            assert loop.holds()
        assert not loop.tasks[0].deltas

    assert page.stage == "auto"
    drive_apart(work, replace(DELTAS, deltas=page.deltas))


def test_a_version_that_changed_everywhere_is_sent_whole() -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            loop.train()
            report = await loop.controller.update(version)
            assert report.ways == {"holder 0": "mapped"}
        assert loop.holds_the_models_weights("e1")

    drive_apart(work)


@pytest.mark.parametrize(
    ("at", "error", "text"),
    [
        (0, ReadError, r"holder 0.*a delta has \d+ bytes, not the|holder 0.*damaged"),
        (-1, TransportError, r"version 2: wrong bytes were staged.*holder 1"),
    ],
    ids=["a code", "a value"],
)
def test_a_damaged_delta_is_named_and_the_next_begins_from_what_was_committed(
    at: int, error: type[WeightSyncError], text: str
) -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.nudge()

        def damage(saved: StagedPart) -> None:
            assert saved.delta
            flip(at % saved.delta.nbytes)(saved)

        undo = after_saving(loop, damage)
        with pytest.raises(error, match=text):
            await loop.controller.update(2)
        assert [engine.serving() for engine in loop.engines.values()] == [1, 1]
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.SERVING}
        undo()
        loop.nudge()
        report = await loop.controller.update(3)
        if error is ReadError:
            assert loop.tasks[-1].deltas[0].base == 1
        else:  # the committed version there may be damaged
            assert not loop.tasks[-1].deltas
        assert report.engines == {"e0": 3, "e1": 3}
        assert loop.holds()
        loop.nudge()
        assert (await loop.controller.update(4)).ways == {"holder 0": "mapped, delta"}
        assert loop.holds()

    drive_apart(work)


def test_a_host_that_lost_the_committed_version_gets_the_whole() -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.nudge()

        def forget(_: StagedPart) -> None:
            store = loop.holders[2].snapshot_store
            assert store
            (part,) = store.snapshots()
            memory = SharedBuffer.open(part.offer.memory)
            memory.tensor[:HEADER_NBYTES] = 0
            memory.close()

        undo = after_saving(loop, forget)
        report = await loop.controller.update(2)
        undo()
        assert report.engines == {"e0": 2, "e1": 2}
        assert loop.holds()
        assert report.bytes_from["holder 0"] > 4 * NUM_ELEMENTS
        loop.nudge()
        report = await loop.controller.update(3)
        assert report.bytes_from["holder 0"] < 4 * NUM_ELEMENTS
        assert loop.holds()

    drive_apart(work)


@pytest.mark.parametrize("behind", [0, 2], ids=["the trainer's holder", "an engine's holder"])
def test_a_holder_that_was_not_told_of_a_commit_gets_or_sends_the_whole_once(behind: int) -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            loop.nudge()
            await loop.controller.update(version)
        await loop.controller.snapshot_index.settled()
        keep = loop.holders[behind].keep_staged

        def lose(_: int) -> None:
            raise PeerError(f"holder {behind}", "the connection was lost, and the call with it")

        loop.holders[behind].keep_staged = lose  # type: ignore[method-assign]
        loop.nudge()
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}
        await loop.controller.snapshot_index.settled()
        loop.holders[behind].keep_staged = keep  # type: ignore[method-assign]
        nbytes = []
        for version in (4, 5):
            loop.nudge()
            report = await loop.controller.update(version)
            nbytes.append(report.bytes_from["holder 0"])
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds()
        assert nbytes[0] > 4 * NUM_ELEMENTS > nbytes[1]

    drive_apart(work)


def test_a_host_whose_committed_version_was_damaged_gets_the_whole_next() -> None:
    """A delta of it makes wrong bytes, as often as it is tried."""

    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        store = loop.holders[2].snapshot_store
        assert store
        (part,) = store.snapshots()
        memory = SharedBuffer.open(part.offer.memory)
        memory.tensor[HEADER_NBYTES + 4 * 40 * 30] ^= 1  # of a bias, which no nudge changes
        memory.close()
        loop.nudge()
        with pytest.raises(TransportError, match=r"version 2: wrong bytes were staged.*holder 2; "):
            await loop.controller.update(2)
        assert [engine.serving() for engine in loop.engines.values()] == [1, 1]
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        assert loop.holds()
        loop.nudge()
        assert (await loop.controller.update(3)).ways == {"holder 0": "mapped, delta"}
        assert loop.holds()

    drive_apart(work)


def test_only_the_first_delta_allocates_memory_and_links_are_not_judged_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, made = [0.0], list[int]()
    create = SharedBuffer.create

    def slow(nbytes: int, **options: bool) -> SharedBuffer:
        now[0] += 100
        made.append(nbytes)
        return create(nbytes, **options)

    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        copied: list[StagedPart] = []
        whole = loop.holders[1].stage

        def stage(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
            copied.extend(done := whole(task, timeout_s))
            return done

        loop.holders[1].stage = stage  # type: ignore[method-assign]
        monkeypatch.setattr(SharedBuffer, "create", slow)
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        for version in (2, 3, 4):
            loop.nudge()
            await loop.controller.update(version)
            assert len([nbytes for nbytes in made if nbytes > HEADER_NBYTES]) == 3, "of each holder"
            assert loop.holds()
        assert [seconds_of(each.spans, "copy") for each in copied] == [0, 0, 0]
        assert [task.deltas[0].seconds for task in loop.tasks[1:]] == [0, 0, 0]

    drive_apart(work)


def test_an_engine_is_refilled_from_a_version_that_came_as_a_delta() -> None:
    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.nudge()
            await loop.controller.update(version)
        loop.engines["e1"].tensors["0.weight"].zero_()
        assert (await loop.controller.refill("e1")).engines == {"e0": 3, "e1": 3}
        assert loop.holds()

    drive_apart(work)
