"""In which order vLLM and SGLang are told to sleep and to wake; tests/gpu does it with them."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.request_loops import FakeLlm, FakeServer, of, stop, until
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync.engines.rank.rank import Rank
from weightsync.engines.serving.engine_ranks import EngineRanks
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.engines.sglang.adapter import SglangEngine
from weightsync.engines.torch import torch_module
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.engines.vllm.adopted import AdoptedVllm
from weightsync.engines.vllm.api import check_sleep
from weightsync.engines.vllm.stepper import Stepper
from weightsync.errors import ConfigError, EngineError, StateError

TIMEOUT_S = patient(10)


class Settable:
    """Can be without memory, and have been started otherwise."""

    has_memory = True

    def _allocate(self, part: str) -> None:
        if not self.has_memory:
            raise MemoryError
        super()._allocate(part)  # type: ignore[misc]

    def started_with(self, sleeps: object) -> None:
        self._sleeps = sleeps


class Vllm(Settable, VllmEngine):
    def __init__(self, calls: list[str]) -> None:
        EngineRanks.__init__(self, "e0")
        llm = FakeLlm()
        llm.calls, self.calls, self._sleeps = calls, calls, True
        self.loop = RequestLoop("e0", lambda: Stepper(llm), stop)
        self.loop.has_cached = True

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        self.calls.append(method)
        return [(None, ())]

    def close(self) -> None:
        self.loop.thread.close()


class Saver(FakeServer):
    async def ask(self, method: str, request: str, **fields: Any) -> None:
        assert request.lower().startswith(method.replace("_", ""))
        self.calls.append(f"{method.split('_')[0]} {' '.join(fields['tags'])}")

    async def label(self, version: str) -> None:
        self.calls.append(f"label {version}")


class Sglang(Settable, SglangEngine):
    def __init__(self, calls: list[str]) -> None:
        EngineRanks.__init__(self, "e0")
        self.server = server = Saver()
        self.loop = RequestLoop("e0", lambda: server, FakeServer.stop)
        server.calls, self.calls, self._sleeps = calls, calls, [True, True]

    def on_ranks(self, method: str, *args: object, **_: object) -> list[Any]:
        self.calls.append(method)
        return [(None, ())]

    def close(self) -> None:
        self.loop.thread.close()


class AsyncLlm:
    """An AsyncLLM's calls, on a loop of its own."""

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    errored = False

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.loop = calls, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("go on")

    async def is_paused(self) -> bool:
        return True

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")

    async def collective_rpc(self, method: str, *, args: tuple[bytes, ...]) -> list[bytes]:
        name, _ = pickle.loads(args[0])
        self.calls.append(name)
        return [pickle.dumps(set() if name == "asleep" else (None, ()))]


class Adopted(Settable, AdoptedVllm):
    def __init__(self, calls: list[str]) -> None:
        self.llm = AsyncLlm(calls)
        super().__init__(self.llm, self.llm.loop)
        self._name = "e0"

    def close(self) -> None:
        self.llm.loop.call_soon_threadsafe(self.llm.loop.stop)
        self.llm.thread.join(TIMEOUT_S)
        self.llm.loop.close()


# What each says of giving all back, of taking a part back, and of going on.
WORDS = {
    Vllm: ("sleep {} keep", "wake ['{}']", ("reset True", "wake ['scheduling']")),
    Adopted: ("sleep {} keep", "wake ['{}']", ("asleep", "go on")),
    Sglang: ("release weights kv_cache", "resume {}", ("label 1", "go on")),
}
Make = Callable[[type], Any]


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def make(calls: list[str]) -> Iterator[Make]:
    made: list[Any] = []

    def run(cls: type) -> Any:
        made.append(cls(calls))
        calls.clear()
        return made[-1]

    yield run
    for engine in made:
        engine.close()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("cls", WORDS)
def test_weights_wake_before_a_load_and_caches_after_it(
    make: Make, calls: list[str], cls: type, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.engines.vllm.adopted.pause_waits", lambda: False)  # as in older versions
    gives, takes, goes_on = WORDS[cls]
    engine = make(cls)
    engine.sleep(level, "wait", TIMEOUT_S)
    assert calls[-2:] == ["settle", gives.format(level)]
    with pytest.raises(StateError, match=r"asleep: pause it first"):
        engine.load(1, TIMEOUT_S)
    calls.clear()
    engine.pause("wait", TIMEOUT_S)
    assert calls[-3:] == [takes.format("weights"), "blank", "settle"]
    calls.clear()
    engine.load(1, TIMEOUT_S)
    engine.resume(1)
    assert calls == ["load", takes.format("kv_cache"), *goes_on]
    assert engine.serving() == 1


@pytest.mark.parametrize("cls", WORDS)
def test_with_its_weights_on_the_host_it_serves_them_again(make: Make, calls: list[str], cls: type) -> None:
    _, takes, goes_on = WORDS[cls]
    engine = make(cls)
    engine.pause("wait", TIMEOUT_S)
    engine.load(1, TIMEOUT_S)
    engine.sleep(1, "wait", TIMEOUT_S)
    engine.sleep(1, "wait", TIMEOUT_S)
    calls.clear()
    engine.resume(1)
    assert calls == [takes.format("weights"), takes.format("kv_cache"), *goes_on]
    engine.sleep(2, "wait", TIMEOUT_S)
    with pytest.raises(StateError, match="no whole weights"):
        engine.resume(1)


@pytest.mark.parametrize("cls", WORDS)
def test_who_is_half_awake_falls_asleep_as_a_whole(
    make: Make, calls: list[str], cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a load that failed: to an engine that still sleeps in part, another sleep is nothing new.

    If somebody else's vLLM was awake as a whole, its core would make tokens of a mix.
    """
    monkeypatch.setattr("weightsync.engines.vllm.adopted.sleeps_half_awake", lambda: True)
    gives, takes, _ = WORDS[cls]
    engine = make(cls)
    engine.sleep(2, "wait", TIMEOUT_S)
    engine.pause("wait", TIMEOUT_S)
    calls.clear()
    engine.sleep(2, "wait", TIMEOUT_S)
    assert calls[-1] == gives.format(2)
    assert (takes.format("kv_cache") in calls) is (cls is not Adopted)
    with pytest.raises(StateError, match="asleep"):
        engine.load(1, TIMEOUT_S)


def test_a_vllm_of_somebody_else_that_would_ignore_it_is_not_told_to_sleep_half_awake(
    make: Make, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.engines.vllm.adopted.sleeps_half_awake", lambda: False)
    engine = make(Adopted)
    engine.sleep(2, "wait", TIMEOUT_S)
    engine.pause("wait", TIMEOUT_S)
    calls.clear()
    with pytest.raises(StateError, match=r"e0 is half awake: .*update or heal it first"):
        engine.sleep(2, "wait", TIMEOUT_S)
    assert not [call for call in calls if "wake" in call or "sleep" in call]
    engine.load(1, TIMEOUT_S)
    engine.resume(1)
    engine.sleep(2, "wait", TIMEOUT_S)


def test_requests_are_refused_while_asleep(make: Make) -> None:
    engine = make(Sglang)
    engine.sleep(2, "wait", TIMEOUT_S)
    with pytest.raises(StateError, match="e0 is asleep: update or wake it first"):
        engine.generate([[1]], {"max_tokens": 1})


def test_sglang_lets_requests_end_for_a_sleep_and_is_not_told_to_with_frozen_ones(make: Make) -> None:
    engine = make(Sglang)
    server = engine.server
    engine.load(1, TIMEOUT_S)
    engine.resume(1)
    threads = [threading.Thread(target=engine.loop.complete, args=([[1]], of(2)))]
    threads[0].start()
    until(lambda: engine.loop.num_running == 1)
    engine.pause("keep", TIMEOUT_S)
    with pytest.raises(StateError, match="frozen requests"):
        engine.sleep(2, "keep", TIMEOUT_S)
    engine.resume(1)
    threads.append(threading.Thread(target=engine.sleep, args=(2, "keep", TIMEOUT_S)))
    threads[1].start()
    server.permits.release(2)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert engine.calls[-1] == "release weights kv_cache"


@pytest.mark.parametrize("cls", WORDS)
def test_an_engine_that_gets_no_memory_is_named_and_is_still_asleep(make: Make, cls: type) -> None:
    engine = make(cls)
    engine.sleep(2, "wait", TIMEOUT_S)
    engine.has_memory = False
    for _ in range(2):
        with pytest.raises(EngineError, match="e0 failed in wake: MemoryError"):
            engine.pause("wait", TIMEOUT_S)
    engine.has_memory = True
    engine.pause("wait", TIMEOUT_S)
    engine.load(1, TIMEOUT_S)


@pytest.mark.parametrize(
    ("cls", "sleeps", "level", "field"),
    [
        (Vllm, False, 2, "options.enable_sleep_mode"),
        (Sglang, [False, False], 2, "options.enable_memory_saver"),
        (Sglang, [False, True], 1, "options.enable_memory_saver"),
        (Sglang, [True, False], 1, "options.enable_weights_cpu_backup"),
    ],
)
def test_who_was_not_started_to_sleep_says_what_with(
    make: Make, calls: list[str], cls: type, sleeps: object, level: int, field: str
) -> None:
    engine = make(cls)
    engine.started_with(sleeps)
    with pytest.raises(ConfigError, match=r"engine e0.*true") as caught:
        engine.sleep(level, "wait", TIMEOUT_S)
    assert caught.value.field == field
    assert calls == []


def test_vllm_is_started_so_that_it_can_sleep() -> None:
    settings: dict[str, Any] = {"enable_sleep_mode": True}
    check_sleep(settings, True)
    assert settings["disable_custom_all_reduce"]
    check_sleep({"disable_custom_all_reduce": False}, False)
    with pytest.raises(ConfigError, match="on GPUs"):
        check_sleep({"enable_sleep_mode": True}, False)
    with pytest.raises(ConfigError, match="disable_custom_all_reduce"):
        check_sleep({"enable_sleep_mode": True, "disable_custom_all_reduce": False}, True)


def test_what_was_dropped_is_zero_also_where_nothing_is_loaded() -> None:
    model = nn.Linear(3, 2)
    rank = Rank("vllm", 0, torch.device("cpu"), SimpleNamespace(model=lambda: model))
    rank.blank()
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("cause", [StateError("not torch's"), RuntimeError("no page-locked memory")])
def test_a_torch_engine_that_cannot_give_its_memory_back_does_not_pass_for_one_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception
) -> None:
    """It is paused by then: an EngineError makes it STALE, and it is filled again."""
    build_tiny_qwen3(tmp_path)
    engine = torch_module.TorchEngine(str(tmp_path), "e0", {"enable_sleep_mode": True})

    def refused(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(torch_module, "Offload", refused)
    with pytest.raises(EngineError, match=str(cause)):
        engine.sleep(2, "wait", patient(5))
    engine.close()


def test_sglang_refuses_to_salt_its_cache(make: Make) -> None:
    engine = make(Sglang)
    engine.use_prefix_cache("drop")
    with pytest.raises(ConfigError, match=r"sync\.prefix_cache.*engine e0: SGLang computes"):
        engine.use_prefix_cache("salt")


def test_a_sleep_leaves_nothing_that_a_salt_could_keep_apart(make: Make, calls: list[str]) -> None:
    engine = make(Vllm)
    engine.use_prefix_cache("salt")
    for sleeps in (False, True):
        engine.pause("wait", TIMEOUT_S)
        if sleeps:
            engine.sleep(1, "wait", TIMEOUT_S)
            engine.pause("wait", TIMEOUT_S)
        engine.load(1, TIMEOUT_S)
        calls.clear()
        engine.resume(1)
        assert ("reset True" in calls) == sleeps
