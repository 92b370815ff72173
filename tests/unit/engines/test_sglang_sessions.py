"""SGLang's sessions, from 0.5.21 on: one for all of our calls, which processes no weights of the model."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from weightsync.engines.sglang.api import SglangServer
from weightsync.engines.sglang.rank_calls import Call

CALL = Call("ipc://nowhere", b"secret", 0, 0, None, "layout", b"")
TO_DRAFT = Call("ipc://nowhere", b"secret", 0, 0, None, "join", b"", to_draft=True)


class Manager:
    """SGLang's rules: weights come in a session, after which the models that it selects are processed."""

    def __init__(self) -> None:
        self.selected, self.log, self.refused = "", [], ""

    async def begin_weight_update(self, request: SimpleNamespace) -> tuple[bool, str]:
        assert not self.selected
        self.selected = request.selector
        return True, ""

    async def end_weight_update(self, request: SimpleNamespace) -> tuple[bool, str]:
        assert self.selected
        self.log.append(f"processed {self.selected}")
        self.selected = ""
        return True, ""

    async def update_weights_from_tensor(self, request: SimpleNamespace, _: None) -> tuple[bool, str]:
        assert self.selected
        self.log.append(f"call to {request.selector}")
        return not self.refused, self.refused


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SglangServer:
    requests = ModuleType("sglang.srt.managers.io_struct")
    for name in ("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput", "UpdateWeightsFromTensorReqInput"):
        setattr(requests, name, SimpleNamespace)
    utils = ModuleType("sglang.srt.utils")
    utils.MultiprocessingSerializer = SimpleNamespace(serialize=lambda value: value)
    managers = ModuleType("sglang.srt.managers")
    managers.io_struct = requests
    found = {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt")}
    found |= {"sglang.srt.managers": managers, requests.__name__: requests, utils.__name__: utils}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    server = SglangServer.__new__(SglangServer)
    server.manager, server.forgets = Manager(), True
    return server


def test_calls_share_a_session_in_which_no_weights_of_the_model_are_processed(server: SglangServer) -> None:
    for call in (TO_DRAFT, CALL, CALL):
        asyncio.run(server.on_ranks([call]))
    assert server.manager.log == ["call to draft", "call to target", "call to target"]
    assert server.manager.selected == "draft"


def test_an_own_update_of_sglang_has_a_session_that_processes_all(server: SglangServer) -> None:
    async def own() -> None:
        await server.on_ranks([CALL])
        async with server.session():
            assert server.manager.selected == "all"
        await server.on_ranks([CALL])

    asyncio.run(own())
    assert server.manager.log == ["call to target", "processed draft", "processed all", "call to target"]
    assert server.manager.selected == "draft"


def test_what_sglang_cannot_update_is_told_in_its_words(server: SglangServer) -> None:
    server.manager.refused = "Online weight updates are not supported while the splits are active"
    with pytest.raises(RuntimeError, match="not supported while the splits are active"):
        asyncio.run(server.on_ranks([CALL]))
