"""A server of SGLang that somebody else started, played by a few coroutines on a loop of their own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.patience import patient
from weightsync.engines.sglang import adopted
from weightsync.engines.sglang.adopted import AdoptedSglang
from weightsync.engines.sglang.api import LOADER
from weightsync.engines.sglang.lora import Adapted, SlotOptions
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError
from weightsync.plan import TensorMeta
from weightsync.plugins import register_sglang
from weightsync.protocol.adapters import AdapterSpec

OPTIONS = {
    "tp_size": 2,
    "model_path": "model",
    "json_model_override_args": "{}",
    "trust_remote_code": False,
    "revision": None,
    "custom_weight_loader": [LOADER],
}
REQUESTS = (
    *("PauseGenerationReqInput", "ContinueGenerationReqInput", "UpdateWeightVersionReqInput"),
    *("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"),
)


class FakeManager:
    """SGLang's rules: the writer's lock is free only while no request runs."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(**OPTIONS)
        self.model_config = SimpleNamespace(dtype="torch.bfloat16")
        self.model_update_lock = SimpleNamespace(writer_lock=asyncio.Lock())
        self.is_pause, self.can_flush, self.log = False, True, []

    async def pause_generation(self, request: SimpleNamespace) -> None:
        self.is_pause = True
        self.log.append(request.mode)

    async def continue_generation(self, request: SimpleNamespace) -> None:
        self.is_pause = False
        self.log.append("continue")

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self.log.append("abort")

    async def flush_cache(self) -> SimpleNamespace:
        return SimpleNamespace(success=self.can_flush)

    async def update_weight_version(self, request: SimpleNamespace) -> None:
        self.log.append(request.new_version)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> FakeManager:
    requests, entry = ModuleType("sglang.srt.managers.io_struct"), ModuleType("sglang.srt.entrypoints.engine")
    for name in REQUESTS:
        setattr(requests, name, SimpleNamespace)
    entry.Engine = SimpleNamespace(begin_weight_update=None)
    managers = ModuleType("sglang.srt.managers")
    managers.io_struct = requests
    for module in (requests, entry, managers, *map(ModuleType, ("sglang", "sglang.srt"))):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return FakeManager()


@pytest.fixture
def engine(manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdoptedSglang]:
    def on_ranks(_: object, method: str, *args: object) -> list[object]:
        return [(np.zeros(1, np.uint64), [])] * 2 if method == "load" else [None] * 2

    monkeypatch.setattr(AdoptedSglang, "on_ranks", on_ranks)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = AdoptedSglang(manager, loop)
    made.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    yield made
    made._replies.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(
    ("mode", "asked"), [("keep", ["retract"]), ("wait", ["retract"]), ("abort", ["abort", "retract"])]
)
def test_it_goes_on_with_the_version_that_it_took(
    manager: FakeManager, engine: AdoptedSglang, mode: str, asked: list[str]
) -> None:
    engine.pause(mode, patient(5))
    assert engine.serving() == 0
    with pytest.raises(StateError, match="no whole weights"):
        engine.resume(7)
    engine.load(1, patient(5))
    engine.resume(7)
    assert engine.serving() == 7
    assert manager.log == [*asked, "7", "continue"]


def test_one_whose_requests_do_not_end_in_time_goes_on(manager: FakeManager, engine: AdoptedSglang) -> None:
    asyncio.run(manager.model_update_lock.writer_lock.acquire())
    with pytest.raises(DeadlineError, match=r"pause \(wait\).*engine e0"):
        engine.pause("wait", 0.05)
    assert manager.log == ["continue"]


def test_it_does_not_serve_a_mix(manager: FakeManager, engine: AdoptedSglang) -> None:
    engine.pause("keep", patient(5))
    engine.load(1, patient(5))
    manager.can_flush = False
    with pytest.raises(EngineError, match="keeps what earlier weights cached"):
        engine.resume(1)
    manager.is_pause = False
    with pytest.raises(StateError, match=r"engine e0: somebody resumed SGLang.*mix"):
        engine.resume(1)
    assert engine.serving() == 0


def test_calls_between_updates_hold_requests_for_a_moment(
    manager: FakeManager, engine: AdoptedSglang
) -> None:
    async def work(_: object) -> list[str]:
        return [*manager.log]

    assert engine._asked("layout", work) == ["in_place"]
    assert manager.log == ["in_place", "continue"]
    engine.pause("keep", patient(5))
    assert engine._asked("load", work) == ["in_place", "continue", "retract"]
    assert manager.is_pause


def test_an_adapters_call_does_not_end_the_pause_of_an_update(
    manager: FakeManager, engine: AdoptedSglang
) -> None:
    begun, ends = threading.Event(), asyncio.Event()

    async def work(_: object) -> None:
        begun.set()
        await ends.wait()

    with ThreadPoolExecutor() as threads:
        call = threads.submit(engine._asked, "adapter", work)
        begun.wait()
        pause = threads.submit(engine.pause, "keep", patient(5))
        engine._loop.call_soon_threadsafe(ends.set)
        pause.result()
        call.result()
    assert manager.log == ["in_place", "continue", "retract"]
    assert manager.is_pause


def test_an_adapters_request_does_not_wait_for_ever(
    engine: AdoptedSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._manager, "run", run)
    monkeypatch.setattr(adopted, "_RUN_S", 0.05)
    with pytest.raises(DeadlineError, match=r"register_adapter.*engine e0, which an update may pause"):
        engine._run([0], Adapted({}, "math@7", "math@7"))


def test_adapters_that_the_server_cannot_take_are_refused(
    manager: FakeManager, engine: AdoptedSglang
) -> None:
    spec = AdapterSpec.of("math", [TensorMeta("up_proj.lora_A.weight", "float32", (2, 4))])
    with pytest.raises(ConfigError, match=r"enable_lora.*start the engine with true"):
        engine.open_adapter(spec)
    engine._slots = SlotOptions.of({"enable_lora": True, "max_loras_per_batch": 2}.get)
    manager.lora_registry = SimpleNamespace(get_all_adapters=lambda: ["math"])
    with pytest.raises(ConfigError, match="the server has loaded an adapter so called"):
        engine.open_adapter(spec)
    manager.lora_registry = SimpleNamespace(get_all_adapters=list)
    with pytest.raises(ConfigError, match=r"max_loras_per_batch.*give at least 3"):
        engine.open_adapter(spec)
    manager.is_pause = True
    with pytest.raises(StateError, match=r"no version yet: update_weights\(\) comes first"):
        engine.open_adapter(spec)


@pytest.mark.parametrize(
    ("option", "value"),
    [("dp_size", 2), ("speculative_algorithm", "EAGLE"), ("custom_weight_loader", None)],
)
def test_a_server_that_cannot_be_updated_is_refused_by_its_option(
    manager: FakeManager, option: str, value: object
) -> None:
    setattr(manager.server_args, option, value)
    with pytest.raises(ConfigError, match=option):
        AdoptedSglang(manager, None)


def test_what_its_requests_forbid_is_refused(engine: AdoptedSglang) -> None:
    with pytest.raises(ConfigError, match=r"prefix_cache.*engine e0: SGLang computes"):
        engine.use_prefix_cache("salt")
    with pytest.raises(ConfigError, match=r"sleep.*server"):
        engine.sleep(1, "keep", patient(5))


@pytest.mark.parametrize(
    ("driver", "main", "joins"),
    [("", "__main__", False), ("10.0.0.1:29500", "__mp_main__", False), ("10.0.0.1:29500", "__main__", True)],
)
def test_the_plug_in_joins_in_the_servers_own_process_where_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str, main: str, joins: bool
) -> None:
    hooks: list[str] = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda target, *_: hooks.append(target))
    registry.HookType = SimpleNamespace(AFTER="after", AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType(main))
    monkeypatch.setenv("WEIGHTSYNC_JOIN", driver)
    register_sglang()
    hooked = [
        "sglang.srt.entrypoints.http_server.set_global_state",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    ]
    assert hooks == (hooked if joins else [])
