"""Requests over HTTP keep the version of the adapter that they name in its slot."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patient
from weightsync.actors.servers.adapter_requests import pass_on
from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.engines.vllm.served import ServedVllm
from weightsync.errors import ConfigError, DeadlineError
from weightsync.plan import TensorMeta
from weightsync.protocol.adapters import AdapterSpec

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
SPEC = AdapterSpec.of("math", [TensorMeta("up_proj.lora_A.weight", "float32", (2, 4))])

FIRST = 1 << 20


class Llm(ServedVllm):
    """Loads at once."""

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        return ["loaded"]


class Server:
    """A server with an adapter in two slots. Each answer takes until `ends` is set."""

    def __init__(self) -> None:
        self.requests = dict[str, Any]()
        model_config = SimpleNamespace(enable_sleep_mode=False)
        llm = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
        self.llm = Llm(llm, SimpleNamespace(), self.requests)
        self.ends, self.asked = asyncio.Event(), list[Any]()

    async def app(self, scope: object, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = json.loads((await receive())["body"] + (await receive())["body"])
        self.asked.append(self.requests.get(body["model"]))
        await self.ends.wait()

    async def ask(self, **body: object) -> list[Any]:
        """Return the messages of the answer."""
        data, answers = json.dumps(body).encode(), list[Any]()
        parts = [{"type": "http.request", "body": data[:9], "more_body": True}]
        parts.append({"type": "http.request", "body": data[9:]})

        async def receive() -> Mapping[str, object]:
            return parts.pop(0)

        async def send(message: Any) -> None:
            answers.append(message)

        await pass_on(self.app, {}, receive, send, self.llm.adapters_of)
        return answers


def update(adapter: AdapterEngine, version: int) -> None:
    adapter.load(1, 0.1)
    adapter.resume(version)


def test_a_version_stays_in_its_slot_until_its_requests_end() -> None:
    async def run() -> None:
        server = Server()
        adapter = server.llm.open_adapter(SPEC)
        (answer, said) = await server.ask(model="math")
        assert answer["status"] == 404
        assert b"math of engine  has no version yet" in said["body"]
        update(adapter, 1)
        running = asyncio.ensure_future(server.ask(model="math"))
        while not server.asked:
            await asyncio.sleep(0)
        assert (server.asked[0].lora_name, server.asked[0].lora_int_id) == (f"math@1 in {FIRST}", FIRST)
        update(adapter, 2)
        assert server.requests["math"].lora_name == f"math@2 in {FIRST + 1}"
        with pytest.raises(DeadlineError, match="calls of generate that use adapter math"):
            update(adapter, 3)
        server.ends.set()
        await running
        update(adapter, 3)
        assert await server.ask(model="other") == []
        assert await server.ask(model="math") == []
        assert [each and each.lora_name for each in server.asked[1:]] == [None, f"math@3 in {FIRST}"]
        for more in ({"background": True}, {"background": "true"}, {"background": 1, "top_p": math.nan}):
            (refused, _) = await server.ask(model="math", **more)  # as vLLM reads it, with Python's own JSON
            assert refused["status"] == 400
        server.llm.close_adapter("math")
        assert server.requests == {}

    asyncio.run(asyncio.wait_for(run(), patient(20)))


def test_an_adapter_that_the_server_loaded_otherwise_is_not_replaced() -> None:
    server = Server()
    server.requests["math"] = "the user's"
    with pytest.raises(ConfigError, match="the server has loaded an adapter so called"):
        server.llm.open_adapter(SPEC)
