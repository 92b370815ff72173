"""Who is blamed: the one that failed, and not the one that missed it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from tests.fleets.loop import Loop, drive
from tests.forked import said_by
from tests.patience import patient
from weightsync.channel import feed as module
from weightsync.channel.feed import EngineFeed, HolderFeed
from weightsync.config import SyncConfig
from weightsync.driver.gather import Outcome, gather_named
from weightsync.driver.healing.healing_policy import Action, decide
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    TransportError,
    WeightSyncError,
)
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, Plan, make_plan
from weightsync.testing import DictEngine

LONG_S = patient(30)
AT_ONCE_S = patient(8)


@pytest.fixture
def plan() -> Plan:
    layout = Layout.from_ranks(list(DictEngine("e0", {"a": torch.zeros(10), "b": torch.zeros(900)}).layout()))
    members = Members(2, (0,), (("e0", (1,)),))
    return make_plan(layout, {"e0": layout}, members, bucket_bytes=1024, max_staging_bytes=1 << 20)


@pytest.fixture
def holder(plan: Plan) -> Iterator[HolderFeed]:
    slots = [SharedBuffer.create(plan.max_bucket_nbytes) for _ in range(plan.slots)]
    feed = HolderFeed("holder 1", "e0", tuple(slot.handle for slot in slots), None, -1)
    yield feed
    feed.close()
    for slot in slots:
        slot.close()


class Clock:
    """The clock of `weightsync.channel.feed`, which a test may set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        fake = SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead_s)
        monkeypatch.setattr(module, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_welcome_is_waited_for_from_the_call_on(
    holder: HolderFeed, plan: Plan, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up() -> None:
        clock.ahead_s += 2 * LONG_S

    monkeypatch.setattr(module, "warm_up", warm_up)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="holder 1"):
        EngineFeed.open(holder.ticket, plan, LONG_S)
    assert time.monotonic() - begun < AT_ONCE_S


def make_slots() -> list[SharedBuffer]:
    return [SharedBuffer.create(4096) for _ in range(2)]


def make_feed(slots: list[SharedBuffer]) -> HolderFeed:
    return HolderFeed("holder 1", "e0", tuple(slot.handle for slot in slots), None, -1)


def starve() -> None:
    """Leave this process no file descriptor."""
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)


def starved(pipe: Connection, when: str) -> None:
    feed = make_feed(slots := make_slots())
    starve()
    try:
        if when == "open":
            feed.close()  # as many as the next one takes
            make_feed(slots)
        feed.accept("digest", 600)
    except PeerError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("when", ["open", "accept"])
def test_a_holder_without_file_descriptors_says_so_at_once(when: str) -> None:
    """ZeroMQ would end the process when the engine connects, or nobody would speak until the deadline."""
    said = said_by(starved, when)
    assert said.startswith("holder 1 failed: it has no file descriptors left of ")
    assert "ulimit -n" in said


def _late(phase: str, *missing: str) -> DeadlineError:
    return DeadlineError(phase, missing, 5.0)


GAVE_UP = TransportError("holder 1 gave up e1")
STARVING = PeerError("holder 1", "it has no file descriptors left of 1024")
LOST = PeerLostError("holder 1", "killed")


@pytest.mark.parametrize(
    ("failures", "missing"),
    [
        ({"engine e1": GAVE_UP, "holder 1": STARVING}, STARVING),
        ({"engine e1": _late("welcome", "holder 1"), "holder 1": STARVING}, STARVING),
        ({"holder 0": GAVE_UP, "holder 1": LOST, "holder 2": STARVING}, LOST),
        # The holder is stopped, and its engine says whom it missed.
        ({"engine e1": _late("welcome", "holder 1"), "holder 1": _late("accept", "holder 1")}, ("holder 1",)),
        (
            {"engine e1": _late("attach", "engine e1"), "holder 1": _late("hello", "engine e1")},
            ("engine e1",),
        ),
        # Both answer, and neither hears the other.
        ({"engine e1": _late("welcome", "holder 1"), "holder 1": _late("hello", "engine e1")}, ("holder 1",)),
        # The others could not go on without it, and gave up before it was given up.
        ({"holder 0": GAVE_UP, "holder 1": _late("join", "holder 1")}, ("holder 1",)),
        ({"join": GAVE_UP, "attach": _late("welcome", "holder 1")}, ("holder 1",)),
        ({"engine e1": GAVE_UP, "holder 1": _late("hello", "engine e1")}, GAVE_UP),
        (
            {"trainer 0": _late("attach", "trainer 0"), "trainer 1": _late("attach", "trainer 1")},
            ("trainer 0", "trainer 1"),
        ),
    ],
)
def test_the_cause_is_raised_and_not_what_follows_from_it(
    failures: dict[str, WeightSyncError], missing: WeightSyncError | tuple[str, ...]
) -> None:
    with pytest.raises(WeightSyncError) as caught:
        Outcome({"holder 7": None}, failures).require()
    if isinstance(missing, WeightSyncError):
        assert caught.value is missing
    else:
        assert isinstance(caught.value, DeadlineError)
        assert caught.value.missing == missing


def test_a_lost_peer_ends_the_wait_of_those_who_need_it() -> None:
    async def wait() -> None:
        await asyncio.sleep(LONG_S)

    async def fail(error: WeightSyncError) -> None:
        raise error

    async def meet() -> None:
        calls = {"engine e1": wait(), "holder 0": fail(STARVING), "holder 1": fail(LOST)}
        (await gather_named(calls, "attach", LONG_S, together=True)).require()

    begun = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        asyncio.run(meet())
    assert caught.value is LOST
    assert time.monotonic() - begun < AT_ONCE_S


def ended(pipe: Connection) -> None:
    feed = make_feed(slots := make_slots())
    pipe.send(feed.ticket)
    assert len(slots) == 2, "there until this process ends"


def test_an_engine_whose_holder_ended_names_it_and_not_the_process_of_its_memory(plan: Plan) -> None:
    ticket = said_by(ended)
    with pytest.raises(PeerLostError, match=r"^holder 1 is gone"):
        EngineFeed.open(ticket, plan, LONG_S)


def test_an_engine_is_not_respawned_for_what_its_holder_says_of_itself() -> None:
    decision = decide(
        STARVING,
        attempt=1,
        max_attempts=3,
        backoff_s=0.0,
        is_dead=False,
        can_refill=True,
        can_respawn=True,
        num_live=1,
        min_engines=1,
    )
    assert decision.action is Action.REFILL


def test_an_engine_that_cannot_attach_says_so_and_nobody_waits_for_it() -> None:
    async def work(loop: Loop) -> None:
        own = EngineError("e1", "attach", "out of memory")

        def fail(*_: object) -> None:
            raise own

        loop.engines["e1"].attach = fail  # type: ignore[method-assign]
        begun = time.monotonic()
        with pytest.raises(EngineError) as caught:
            await loop.controller.connect()
        assert caught.value is own
        assert time.monotonic() - begun < AT_ONCE_S

    drive(work, SyncConfig(bucket_bytes=4096, timeout_s=LONG_S, connect_timeout_s=LONG_S))
