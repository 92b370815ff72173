"""What an engine's actor answers, without Ray, and how it treats caches, over Ray."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.caching_engine import Caching, CannotSalt
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, WeightSync
from weightsync.actors import engine_calls
from weightsync.actors.engine_calls import EngineCalls, Methods
from weightsync.actors.ray.placement import Placement
from weightsync.engines.rank.rank_host import RankHost
from weightsync.engines.rank.rank_process import this_host
from weightsync.errors import DeadlineError, PlanError, StateError
from weightsync.plan import RankLayout, Segment, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

META = TensorMeta("w", "float32", (2, 3))
LAYOUT = RankLayout((META,), (Segment.whole(META),), buffers=(META,), device="cuda:GPU-1")


class Adapter:
    def __init__(self) -> None:
        self.num_asked, self.both_have_asked = 0, threading.Event()

    def layout(self) -> list[object]:
        self.num_asked += 1
        assert self.both_have_asked.wait(patient(10))
        return []


class Calls(EngineCalls):
    def __init__(self, adapter: Adapter, name: str = "") -> None:
        self._engine, self._name = adapter, name  # type: ignore[assignment]


def test_an_engine_works_out_its_layout_once_though_two_ask_at_a_time() -> None:
    adapter = Adapter()
    calls = Calls(adapter)

    async def ask() -> None:
        both = asyncio.gather(calls.sync_placements(), calls.sync_layout())
        await asyncio.sleep(0)  # each has gone as far as it goes
        adapter.both_have_asked.set()
        assert await both == [[], []]
        assert await calls.sync_placements() == []

    asyncio.run(ask())
    assert adapter.num_asked == 1


class Committing(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.served: list[int] = []

    def layout(self) -> list[object]:
        return [LAYOUT]

    def resume(self, version: int) -> None:
        if version > 8:
            raise StateError("load weights first")
        self.served.append(version)

    def open_adapter(self, spec: AdapterSpec) -> Committing:
        return self

    def close_adapter(self, name: str) -> None: ...


def test_a_commit_is_logged_with_the_version_that_is_served(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Committing()
    calls, spec = Calls(adapter, "e0"), AdapterSpec.of("math", ())

    async def commit() -> None:
        calls.sync_resume(7)
        await calls.sync_open_adapter(spec)
        await calls.sync_adapter(spec, "sync_resume", 3)
        with pytest.raises(StateError):
            calls.sync_resume(9)

    with caplog.at_level("INFO", "weightsync"):
        asyncio.run(commit())
    assert caplog.messages == ["[engine e0 · v7] serves", "[engine e0 adapter math · v3] serves"]
    assert adapter.served == [7, 3]


class Halting(Committing):
    """Each call ends once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = list[str](), list[str]()
        self.may_end = threading.Semaphore(0)

    def _run(self, name: str) -> None:
        self.begun.append(name)
        assert self.may_end.acquire(timeout=patient(10))
        self.ended.append(name)

    def pause(self, mode: str, timeout_s: float) -> None:
        self._run("pause")

    def resume(self, version: int) -> None:
        self._run(f"resume {version}")


def test_a_commit_that_was_given_up_ends_before_the_next_pause() -> None:
    adapter = Halting()
    methods = Methods(Calls(adapter, "e0"))

    def until_begun(name: str) -> None:
        deadline = time.monotonic() + patient(10)
        while name not in adapter.begun:
            assert time.monotonic() < deadline

    with ThreadPoolExecutor() as threads:  # as a node's, which has one for each call
        commit = threads.submit(methods.resume, 1)
        until_begun("resume 1")
        with pytest.raises(DeadlineError, match=r"pause \(keep\): no answer within 0.1 s from engine e0"):
            methods.pause("keep", 0.1)
        pause = threads.submit(methods.pause, "keep", patient(10))
        adapter.may_end.release()
        until_begun("pause")
        assert adapter.ended == ["resume 1"]
        adapter.may_end.release()
        assert (commit.result(), pause.result()) == (None, None)


class SlowToAttach(Committing):
    """Its first attach takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.plans = threading.Event(), list[str]()

    def attach(self, plan: str, tickets: object, timeout_s: float) -> list[object]:
        if plan == "first":
            assert self.may_end.wait(patient(10))
        self.plans.append(plan)
        return []


def test_an_attach_that_was_given_up_ends_before_the_next_begins() -> None:
    """Else an engine would read from the holders of a connection that has ended."""
    adapter = SlowToAttach()
    calls = Calls(adapter, "e0")

    async def attach(plan: str) -> None:
        await calls.sync_attach(plan, (), patient(10))  # type: ignore[arg-type]

    async def twice() -> None:
        first = asyncio.create_task(attach("first"))
        await asyncio.sleep(0.1)
        first.cancel()
        again = asyncio.create_task(attach("second"))
        await asyncio.wait([again], timeout=0.5)
        adapter.may_end.set()
        await again

    asyncio.run(twice())
    assert adapter.plans == ["first", "second"]


class Declaring(Adapter):
    def layout(self) -> list[object]:
        self.num_asked += 1
        return [LAYOUT, LayoutTable.of(LAYOUT)]


def test_an_adapter_may_declare_objects_or_columns_and_columns_are_made_once() -> None:
    adapter = Declaring()
    calls = Calls(adapter)

    async def ask() -> None:
        tables = await calls.sync_layout()
        assert [each.rank_layout() for each in tables] == [LAYOUT, LAYOUT]
        assert [each.device for each in await calls.sync_placements()] == [LAYOUT.device] * 2
        first, second = await calls.sync_outline()
        assert first == second
        assert await calls.sync_layout() is tables

    asyncio.run(ask())
    assert adapter.num_asked == 1


class Ranked:
    """An engine whose second rank is at `hosts[1]`."""

    def __init__(self, *hosts: RankHost) -> None:
        self._hosts = hosts

    def layout(self) -> list[RankLayout]:
        return [LAYOUT] * 2

    def hosts(self) -> tuple[RankHost, ...]:
        return self._hosts


def test_a_rank_on_another_of_rays_hosts_has_a_place_of_its_own() -> None:
    near = RankHost(this_host(), ray.get_runtime_context().get_node_id(), "10.0.0.1", 7)
    far = RankHost("node-7 b00t", "another", "10.0.0.7", 8)
    first, second = asyncio.run(Calls(Ranked(near, far)).sync_placements())
    assert first.node == near.node
    assert (first.pid, first.device) == (os.getpid(), LAYOUT.device)
    assert second == Placement("another", "10.0.0.7", LAYOUT.device, 8)


def test_a_rank_on_another_host_that_ray_did_not_start_is_refused_by_name() -> None:
    calls = Calls(Ranked(RankHost(this_host()), RankHost("node-7 b00t")))
    with pytest.raises(ConfigError, match=r"llm: 'a rank on node-7 b00t' .* by vLLM's executor ray"):
        asyncio.run(calls.sync_placements())


class MadeByACoroutine(EngineCalls):
    @cached_property
    def _engine(self) -> Any:  # type: ignore[override]
        asyncio.get_running_loop()
        return Declaring()


def test_an_engine_may_be_made_on_first_use_in_the_actors_event_loop() -> None:
    (first, _) = asyncio.run(MadeByACoroutine().sync_placements())
    assert first.device == LAYOUT.device


class Exporting(Adapter):
    def can_export(self) -> list[bool]:
        return [True, False]

    def export(self) -> list[DeviceMemory | None]:
        return [DeviceMemory.of({}), None]


def test_an_engine_that_does_not_say_whether_it_exports_is_taken_not_to() -> None:
    assert asyncio.run(Calls(Adapter()).sync_can_export()) == [False]
    assert asyncio.run(Calls(Exporting()).sync_can_export()) == [True, False]
    assert asyncio.run(Calls(Adapter()).sync_export()) == ()
    exporting = Exporting()
    exporting.both_have_asked.set()
    assert asyncio.run(Calls(exporting).sync_export()) == [DeviceMemory.of({}), None]


class Speculating(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.both_have_asked.set()
        self.used: list[object] = []

    def use_components(self, components: object) -> None:
        self.used.append(components)


def test_a_layout_is_asked_for_again_only_if_components_are_treated_otherwise() -> None:
    adapter = Speculating()
    calls = Calls(adapter)

    async def ask() -> None:
        await calls.sync_placements()
        await calls.sync_outline({})
        assert (adapter.num_asked, adapter.used) == (1, [])
        for _ in range(2):
            await calls.sync_outline({"draft": "frozen"})
        await calls.sync_placements()
        assert (adapter.num_asked, adapter.used) == (2, [{"draft": "frozen"}])

    asyncio.run(ask())


class Drafting(Speculating):
    """Exports its draft, too, once it trains it."""

    def export(self) -> list[DeviceMemory | None]:
        self.used.append("exported")
        return [None, None]


def test_components_are_treated_as_asked_before_an_engine_exports() -> None:
    adapter = Drafting()
    calls = Calls(adapter)

    async def ask() -> None:
        trained = {"draft": "trained"}
        await asyncio.gather(calls.sync_export(trained), calls.sync_layout(trained))
        assert (adapter.num_asked, adapter.used) == (1, [trained, "exported"])

    asyncio.run(ask())


class Attaching(Declaring):
    """Ranks that load nothing."""

    def attach(self, *_: object) -> list[Attached]:
        return [Attached("digest", None), Attached("digest", None)]

    def load(self, *_: object) -> list[Loaded]:
        return [Loaded(np.ones(1, np.uint64), ()) for _ in range(2)]


def test_an_engine_answers_before_it_can_add_digests_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be added up fails its first load."""
    calls, answered = Calls(Attaching()), threading.Event()

    def fail(*_: object) -> None:
        assert answered.wait(patient(10)), "it waits before it answers"
        raise PlanError("w", "no rank keeps some part of it")

    monkeypatch.setattr(engine_calls, "EngineDigests", fail)
    tickets = [FeedTicket("holder 0", "e", "ipc://", b"", (), None, -1) for _ in range(2)]
    plan: Any = None
    asyncio.run(calls.sync_attach(plan, tickets, patient(10)))
    answered.set()
    with pytest.raises(PlanError, match="w: no rank keeps some part"):
        calls.sync_load(1, patient(10))


WIDTH = 64


def test_engines_are_told_what_to_do_with_caches_when_they_join() -> None:
    trainer, plain = spawn(Trainer, WIDTH, "t"), spawn(Engine, WIDTH, "plain", "plain")
    first, second = (spawn(Caching, WIDTH, name) for name in ("e0", "e1"))
    for treatment in ("salt", "drop"):
        with WeightSync(SyncConfig(prefix_cache=treatment, bucket_bytes=4096)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": first, "plain": plain})
            sync.connect()
            sync.update_weights()
            sync.add_engine("e1", second)
            assert ray.get([each.treatment.remote() for each in (first, second)]) == [treatment] * 2


def test_an_engine_that_cannot_salt_is_refused_by_its_name() -> None:
    trainer, engines = spawn(Trainer, WIDTH, "t"), {"e0": spawn(Caching, WIDTH, "e0", CannotSalt)}
    with WeightSync(SyncConfig(prefix_cache="salt", bucket_bytes=4096)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        with pytest.raises(ConfigError, match=r"sync\.prefix_cache: 'salt'.*engine e0.*know no versions"):
            sync.connect()
    with WeightSync(SyncConfig(bucket_bytes=4096)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        assert sync.update_weights(1).engines == {"e0": 1}
