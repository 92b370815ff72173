"""Requests to a server of SGLang get the slots of the adapters that they name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patient
from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.engines.sglang.served import answer, serve
from weightsync.errors import DeadlineError
from weightsync.plan import TensorMeta
from weightsync.protocol.adapters import AdapterSpec


def opened(name: str, numbers: tuple[int, int]) -> AdapterEngine:
    spec = AdapterSpec.of(name, [TensorMeta("up_proj.lora_A.weight", "float32", (2, 4))])
    return AdapterEngine("e0", spec, numbers, lambda *_: ["loaded"])


def update(adapter: AdapterEngine, version: int) -> None:
    adapter.load(1, 0.1)
    adapter.resume(version)


@pytest.fixture
def adapters() -> Iterator[dict[str, AdapterEngine]]:
    held = {"math": opened("math", (7, 8)), "code": opened("code", (9, 10))}
    serve(held)
    yield held
    serve({})


async def generate(manager: Any, asked: Any, request: object = None) -> AsyncGenerator[Any, None]:
    """Answer once before `manager` is set, and once afterwards."""
    answers = [{"meta_info": {}} for _ in asked.lora_path] if isinstance(asked.lora_path, list) else None
    yield answers or {"meta_info": {}}
    await manager.wait()
    yield answers or {"meta_info": {}}


def request(lora_path: Any, extra_key: Any = None) -> SimpleNamespace:
    return SimpleNamespace(lora_path=lora_path, extra_key=extra_key)


@pytest.mark.parametrize(
    ("lora_path", "extra_key", "slots", "keys", "versions"),
    [
        ("math", None, "math@7", "math@7 1 ", {"math": 1}),
        ("math", "user", "math@7", "math@7 1 user", {"math": 1}),
        ("math", ["a", "b"], ["math@7", "math@7"], ["math@7 1 a", "math@7 1 b"], {"math": 1}),
        (
            ["math", None, "theirs", "code"],
            "u",
            ["math@7", None, "theirs", "code@9"],
            ["math@7 1 u", "u", "u", "code@9 2 u"],
            {"math": 1, "code": 2},
        ),
        (["theirs", None], None, ["theirs", None], None, None),
        (None, "u", None, "u", None),
    ],
)
def test_a_request_gets_slots_and_prefixes_of_versions(
    adapters: dict[str, AdapterEngine], lora_path: Any, extra_key: Any, slots: Any, keys: Any, versions: Any
) -> None:
    update(adapters["math"], 1)
    update(adapters["code"], 2)

    async def run() -> Any:
        ends = asyncio.Event()
        ends.set()
        return [each async for each in answer(generate, ends, asked, None)]

    asked = request(lora_path, extra_key)
    made = asyncio.run(asyncio.wait_for(run(), patient(20)))
    assert (asked.lora_path, asked.extra_key) == (slots, keys)
    for each in made:
        infos = each if isinstance(each, list) else [each]
        assert [info["meta_info"].get("adapter_versions") for info in infos] == [versions] * len(infos)


def test_a_version_stays_in_its_slot_until_its_requests_end(adapters: dict[str, AdapterEngine]) -> None:
    math = adapters["math"]
    update(math, 1)

    async def run() -> None:
        ends, later = asyncio.Event(), request("math")
        running = answer(generate, ends, request("math"), request=None)
        await anext(running)
        update(math, 2)
        begun = answer(generate, ends, later)
        await anext(begun)
        assert later.lora_path == "math@8"
        with pytest.raises(DeadlineError, match="calls of generate that use adapter math"):
            update(math, 3)
        await running.aclose()  # its client has gone
        update(math, 3)
        await begun.aclose()

    asyncio.run(asyncio.wait_for(run(), patient(20)))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request("math"), "adapter math of engine e0 has no version yet"),
        (request(["code@9"]), "'code@9' is a slot: name the adapter, 'code'"),
        (SimpleNamespace(lora_path="code"), "adapter 'code' answers no embeddings"),
    ],
)
def test_a_request_that_no_slot_can_answer_is_refused(
    adapters: dict[str, AdapterEngine], asked: Any, why: str
) -> None:
    update(adapters["code"], 1)
    with pytest.raises(ValueError, match=why):
        asyncio.run(anext(answer(generate, asyncio.Event(), asked)))
    update(adapters["code"], 2)  # its slots are free
    update(adapters["code"], 3)
