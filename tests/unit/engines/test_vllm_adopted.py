"""An AsyncLLM that somebody else made, played by a few coroutines on a loop of their own."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from uuid import uuid4

import numpy as np
import pytest
import torch

from tests.pages import run_block
from tests.patience import patient
from weightsync.engines.rank.rank import Rank
from weightsync.engines.vllm.adopted import AdoptedVllm
from weightsync.engines.vllm.api import asleep, require_updatable
from weightsync.engines.vllm.worker import WeightSyncWorker
from weightsync.errors import ConfigError, DeadlineError, EngineError, PeerLostError, StateError
from weightsync.faults import Fault
from weightsync.protocol.daemon import on_daemon


class FakeVllm:
    """Two ranks that load; `fails` is what they answer instead."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
        self.asleep = set()
        self.errored, self.paused, self.asked = False, False, []
        self.fails: Exception | None = None
        self.drained = asyncio.Event()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache or mode == "keep"
        self.paused = True
        if mode == "wait":
            await self.drained.wait()

    async def resume_generation(self) -> None:
        self.paused = False

    async def sleep(self, level: int, mode: str) -> None:
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str]) -> None:
        """Wake, and resume once all is awake, as vLLM's core does."""
        self.asleep -= {*tags}
        self.paused = bool(self.asleep)

    async def is_paused(self) -> bool:
        return self.paused

    async def collective_rpc(self, method: str, *, args: tuple[bytes, ...]) -> list[bytes]:
        if self.errored:
            raise RuntimeError("EngineCore encountered an issue")
        assert method == "ws_call"
        name, given = pickle.loads(args[0])
        self.asked.append((name, given))
        answers = {
            "load": [(np.zeros(1, np.uint64), [])] * 2,
            "asleep": [self.asleep] * 2,
        }
        return [pickle.dumps(self.fails or answer) for answer in answers.get(name, [None] * 2)]


@pytest.fixture
def adopted() -> Iterator[tuple[FakeVllm, AdoptedVllm]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    llm = FakeVllm()
    llm.loop = loop
    yield llm, AdoptedVllm(llm, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_several_replicas_are_refused_by_the_options_name() -> None:
    """vLLM would return the answers of the first one alone."""
    llm = FakeVllm()
    llm.engine_core = SimpleNamespace(core_engines=[b"0", b"1"])
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2.*register an engine for each replica"):
        AdoptedVllm(llm, None)


def test_it_goes_on_with_the_version_that_it_took(adopted) -> None:
    llm, engine = adopted
    with pytest.raises(StateError, match="no whole weights"):
        engine.resume(1)
    engine.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    engine.pause("keep", patient(1))
    assert (llm.paused, engine.serving()) == (True, 0)
    assert len(engine.load(1, patient(1))) == 2
    engine.resume(7)
    assert (llm.paused, engine.serving()) == (False, 7)
    engine.check()


def test_one_that_others_resumed_while_it_was_written_does_not_serve(adopted) -> None:
    llm, engine = adopted
    engine.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    engine.pause("keep", patient(1))
    engine.load(1, patient(1))
    llm.paused = False
    with pytest.raises(StateError, match=r"engine e0: somebody resumed vLLM.*mix"):
        engine.resume(1)
    assert engine.serving() == 0
    engine.pause("keep", patient(1))
    engine.load(1, patient(1))
    engine.resume(1)
    assert engine.serving() == 1


@pytest.mark.parametrize("paused", [True, False])
def test_it_is_resumed_without_a_wait_for_the_answer_whether_it_was_paused(adopted, paused: bool) -> None:
    """vLLM asks its cores in further tasks, and the answer may come late."""
    llm, engine = adopted
    came: list[str] = []
    resumed = asyncio.Event()

    async def core_is_paused() -> bool:
        came.append("is_paused")
        was = llm.paused
        await resumed.wait()
        return was

    async def core_resumes() -> None:
        came.append("resume_generation")
        llm.paused = False
        resumed.set()

    async def is_paused() -> bool:
        return (await asyncio.gather(core_is_paused()))[0]

    engine.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    engine.pause("keep", patient(1))
    engine.load(1, patient(1))
    llm.paused, llm.is_paused, llm.resume_generation = paused, is_paused, core_resumes
    resuming = on_daemon(lambda: engine.resume(1), "resumes")
    if paused:
        resuming.result(patient(5))
    else:
        with pytest.raises(StateError, match=r"engine e0: somebody resumed vLLM.*mix"):
            resuming.result(patient(5))
    assert came == ["is_paused", "resume_generation"]
    assert engine.serving() == int(paused)


def test_one_that_can_sleep_and_that_others_resumed_while_it_was_written_fails_its_load(adopted) -> None:
    llm, engine = adopted
    llm.vllm_config.model_config.enable_sleep_mode = True
    engine.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    engine.pause("keep", patient(1))
    llm.paused = False
    with pytest.raises(StateError, match=r"engine e0: somebody resumed vLLM.*mix"):
        engine.load(1, patient(1))
    engine.pause("keep", patient(1))
    engine.load(2, patient(1))
    engine.resume(1)
    assert engine.serving() == 1


def test_its_ranks_are_asked_whether_they_export_and_told_whether_they_sleep(adopted) -> None:
    llm, engine = adopted
    engine.can_export()
    assert llm.asked[-1] == ("export", (False,))
    llm.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    llm.sleep = _at_once
    engine.sleep(1, "keep", patient(1))
    engine.can_export()
    assert llm.asked[-1] == ("export", (True,))


async def _at_once(*_: object) -> None: ...


def test_caches_that_others_put_to_sleep_stay_asleep_and_vllm_paused(adopted) -> None:
    llm, engine = adopted
    llm.vllm_config.model_config.enable_sleep_mode, llm.asleep = True, {"kv_cache"}
    engine.pause("keep", patient(1))
    engine.load(1, patient(1))
    engine.resume(1)
    assert (llm.paused, engine.serving()) == (True, 1)
    llm.asleep = set()
    engine.resume(1)
    assert not llm.paused


class Sleeper:
    """A host whose weights others put to sleep."""

    def asleep(self) -> list[str]:
        return ["weights"]


@pytest.mark.parametrize("call", [("layout", ()), ("attach", (None, [], 1.0, False))])
def test_a_rank_whose_weights_others_put_to_sleep_touches_no_memory(call: tuple[str, tuple[object]]) -> None:
    rank = Rank("vllm", 3, torch.device("cpu"), Sleeper())
    error = rank.answer(*call)
    assert isinstance(error, StateError)
    assert "the weights of rank 3 are asleep: wake them" in str(error)


def test_vllms_own_record_says_what_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    data = pytest.importorskip("vllm.device_allocator").AllocationData
    assert asleep() == set()
    held = {1: data((0, 0, 1, 0), "weights"), 2: data((0, 0, 2, 0), "kv_cache", is_asleep=True)}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=held))
    assert asleep() == {"kv_cache"}
    held[1].is_asleep = True
    assert asleep() == {"kv_cache", "weights"}


def test_a_load_that_failed_leaves_it_paused(adopted) -> None:
    llm, engine = adopted
    engine.pause("keep", patient(1))
    engine.load(1, patient(1))
    llm.fails = EngineError("e0", "load", "half of it came", 1)
    with pytest.raises(EngineError, match="half of it came"):
        engine.load(2, patient(1))
    with pytest.raises(StateError, match="no whole weights"):
        engine.resume(2)
    assert llm.paused


def test_one_that_does_not_pause_in_time_goes_on(adopted) -> None:
    llm, engine = adopted
    with pytest.raises(DeadlineError, match="pause"):
        engine.pause("wait", 0.05)
    assert not llm.paused


def test_one_whose_load_failed_stays_paused_when_it_does_not_pause_in_time(adopted) -> None:
    """Its weights are a mix."""
    llm, engine = adopted
    engine.pause("keep", patient(1))
    llm.fails = EngineError("e0", "load", "half of it came", 1)
    with pytest.raises(EngineError, match="half of it came"):
        engine.load(1, patient(1))
    for _ in range(2):
        with pytest.raises(DeadlineError, match="pause"):
            engine.pause("wait", 0.05)
        assert llm.paused
    llm.fails = None
    engine.load(2, patient(1))
    engine.resume(2)
    with pytest.raises(DeadlineError, match="pause"):
        engine.pause("wait", 0.05)
    assert (llm.paused, engine.serving()) == (False, 2)


def test_one_that_waits_for_its_first_version_stays_paused_when_it_does_not_pause_in_time(adopted) -> None:
    llm, engine = adopted
    asyncio.run_coroutine_threadsafe(engine.hold(), llm.loop).result(patient(5))
    with pytest.raises(DeadlineError, match="pause"):
        engine.pause("wait", 0.05)
    assert llm.paused


def test_a_load_that_was_given_up_does_not_call_the_mix_of_the_next_one_whole(adopted) -> None:
    """The driver gave it up. It ends while the next one writes, which then fails."""
    llm, engine = adopted
    ask, begun = llm.collective_rpc, [threading.Event(), threading.Event()]
    go_on, numbers = [asyncio.Event(), asyncio.Event()], iter(range(2))

    async def asked(method: str, *, args: tuple[bytes, ...]) -> list[bytes]:
        if pickle.loads(args[0])[0] == "load":
            number = next(numbers)
            begun[number].set()
            await go_on[number].wait()
            llm.fails = EngineError("e0", "load", "half of it came", 1) if number else None
        return await ask(method, args=args)

    llm.collective_rpc = asked
    engine.pause("keep", patient(5))
    with ThreadPoolExecutor() as threads:
        loads = []
        for each in begun:
            loads.append(threads.submit(engine.load, 1, patient(5)))
            assert each.wait(patient(5))
        for event, load in zip(go_on, loads, strict=True):
            llm.loop.call_soon_threadsafe(event.set)
            error = load.exception(patient(5))
    assert "half of it came" in str(error)
    llm.fails = None
    with pytest.raises(StateError, match="no whole weights"):
        engine.resume(1)


def test_vllm_makes_no_tokens_of_a_mix_when_its_caches_wake_to_sleep_again(adopted) -> None:
    llm, engine = adopted
    llm.vllm_config.model_config.enable_sleep_mode = True
    engine.sleep(2, "keep", patient(1))
    engine.pause("keep", patient(1))
    llm.fails = EngineError("e0", "load", "half of it came", 1)
    with pytest.raises(EngineError, match="half of it came"):
        engine.load(1, patient(1))
    assert llm.asleep == {"kv_cache"}
    llm.fails, sleep = None, llm.sleep

    async def asked(level: int, mode: str) -> None:
        assert llm.paused
        await sleep(level, mode)

    llm.sleep = asked
    engine.sleep(2, "keep", patient(1))
    engine.pause("keep", patient(1))
    engine.load(2, patient(1))
    engine.resume(2)
    assert (llm.paused, llm.asleep) == (False, set())


def test_the_worker_class_is_asked_for_by_name(adopted) -> None:
    llm, engine = adopted
    llm.collective_rpc = _without_extension
    with pytest.raises(ConfigError, match=r"worker_extension_cls.*weightsync\.WeightSyncWorker"):
        engine.layout()


async def _without_extension(method: str, *, args: tuple[bytes, ...]) -> list[bytes]:
    raise NotImplementedError(f"Method {method!r} is not implemented")


def test_a_core_that_is_dead_is_lost(adopted) -> None:
    llm, engine = adopted
    llm.errored = True
    for call in (engine.check, engine.layout):
        with pytest.raises(PeerLostError, match="core is dead"):
            call()


def test_faults_of_its_ranks_strike_in_their_processes(adopted) -> None:
    llm, engine = adopted
    fault = Fault(process="engine e0", action="error", at="move", rank=1)
    engine.set_faults("engine e0", [fault], 0)
    assert llm.asked[-1] == ("set_faults", ("engine e0", ((), (fault,)), 0))


def refusal(config: SimpleNamespace, model: torch.nn.Module) -> ConfigError:
    """Of a worker's first call, in an engine of that configuration."""
    worker = WeightSyncWorker()
    worker.rank, worker.device = 0, torch.device("cpu")
    worker.model_runner = SimpleNamespace(vllm_config=config, get_model=lambda: model)
    error = pickle.loads(worker.ws_call(pickle.dumps(("layout", ()))))
    assert isinstance(error, ConfigError)
    return error


def test_a_worker_whose_kernels_would_read_freed_scales_refuses_its_first_call() -> None:
    config = SimpleNamespace(
        speculative_config=None, model_config=SimpleNamespace(quantization="compressed-tensors")
    )
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].scheme = SimpleNamespace(kernel=SimpleNamespace(dnnl_handler=object()))
    error = refusal(config, model)
    assert (error.field, error.value) == ("quantization", "compressed-tensors")
    assert "freed scales in 0 after a reload" in error.remedy


def test_a_cache_whose_scales_are_dummies_is_refused() -> None:
    loading = SimpleNamespace(load_format="dummy")
    config = SimpleNamespace(speculative_config=None, model_config=None, load_config=loading)
    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].kv_cache_dtype, model[0]._k_scale_float = "fp8", 3e-4
    error = refusal(config, model)
    assert (error.field, error.value) == ("kv_cache_dtype", "fp8")
    assert "scales of 0 were drawn at random" in error.remedy
    model[0].kv_cache_dtype = "auto"  # nothing reads the scales
    require_updatable(config, model)
    model[0].kv_cache_dtype, model[0]._k_scale_float = "fp8", 1.0
    require_updatable(config, model)
    config.load_config.load_format, model[0]._k_scale_float = "auto", 0.7
    require_updatable(config, model)


@pytest.mark.parametrize("field", ["speculative_config.draft_lm_head_quantization", "sleep_mode_backend"])
def test_what_updates_or_sleeps_would_break_is_refused_by_name(field: str) -> None:
    draft, backend = ("fp8", "cumem") if "draft" in field else (None, "criu")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_lm_head_quantization=draft),
        model_config=SimpleNamespace(sleep_mode_backend=backend),
    )
    with pytest.raises(ConfigError) as caught:
        require_updatable(config, torch.nn.Identity())
    assert (caught.value.field, caught.value.value) == (field, draft or backend)
    config.speculative_config = config.model_config = None
    require_updatable(config, torch.nn.Identity())


def test_the_pages_request_is_sent_again_while_vllm_refuses_it() -> None:
    class RefusedError(Exception): ...

    refusals = [RefusedError(), RefusedError()]

    async def generate(prompt: str, params: object, name: str) -> AsyncIterator[str]:
        if refusals:
            raise refusals.pop()
        yield f"{prompt}!"

    names = {"asyncio": asyncio, "time": time, "uuid4": uuid4, "RetryableRequestError": RefusedError}
    complete = run_block("docs/guide.md", 1, names)["complete"]
    asked = SimpleNamespace(llm=SimpleNamespace(generate=generate))
    assert asyncio.run(complete(asked, "Hello", None)) == "Hello!"
    refusals.append(RefusedError())
    with pytest.raises(RefusedError):
        asyncio.run(complete(asked, "Hello", None, timeout_s=patient(-1)))


def test_its_owners_requests_cannot_be_salted(adopted) -> None:
    _, engine = adopted
    engine.attach(None, [SimpleNamespace(engine="e0")] * 2, patient(1))
    engine.use_prefix_cache("drop")
    with pytest.raises(ConfigError, match=r"sync\.prefix_cache.*engine e0: its requests are made by"):
        engine.use_prefix_cache("salt")


@pytest.mark.parametrize("name", ["pause_generation_async", "pause_scheduler_async"])
def test_vllms_nap_after_a_pause_is_left_out(adopted: tuple[FakeVllm, AdoptedVllm], name: str) -> None:
    """vLLM has the cache of inputs on both sides, which forget together."""
    llm, engine = adopted
    called: list[object] = []

    async def clear() -> None:
        called.append("cleared")

    async def pause(**settings: object) -> None:
        called.append(settings)

    llm.renderer = SimpleNamespace(clear_mm_cache_async=clear)
    llm.engine_core = SimpleNamespace(**{name: pause})
    engine.pause("keep", patient(5))
    assert called == ["cleared", {"mode": "keep", "clear_cache": True}]
    assert not llm.paused  # by `pause_generation`, which naps


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_settle_unless_vllms_pause_has_waited_for_them(
    adopted: tuple[FakeVllm, AdoptedVllm], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, engine = adopted
    monkeypatch.setattr("weightsync.engines.vllm.adopted.pause_waits", lambda: waits)
    engine.pause("keep", patient(5))
    assert llm.paused
    assert ("settle" in dict(llm.asked)) is not waits
