"""A rank as SGLang runs it: in a process of its own, called through the weight loader, answering on a socket.

SGLang itself is not in it: the process calls the loader as its scheduler does, with a model of
transformers that has a loader of its own. `test_engines.py` runs it in SGLang, where that is installed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models import build_tiny_qwen3
from weightsync.engines import sglang_api, sglang_worker
from weightsync.engines.ranks import RankProcess
from weightsync.engines.sglang_api import stored_otherwise
from weightsync.engines.sglang_channel import Replies
from weightsync.engines.sglang_worker import RankSettings, receive
from weightsync.errors import EngineError

TIMEOUT_S = 60.0
NOTHING = torch.empty(0, dtype=torch.uint8)


class Served(nn.Module):
    """A model whose loader copies, as an engine's does."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(path)

    def load_weights(self, weights) -> None:
        parameters = dict(self.inner.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


def scheduler(path: str, pipe: Connection) -> None:
    """What SGLang's does with each request to update weights."""
    model = Served(path)
    with torch.inference_mode():
        for blob in iter(pipe.recv, None):
            receive(model, [(blob, NOTHING)])
            pipe.send("done")


class Ranks:
    def __init__(self, path: str) -> None:
        self.settings = RankSettings("e0", path, "float32", repacks=False)
        self.replies = Replies("e0", 1)
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=scheduler, args=(path, theirs))
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: object) -> object:
        calls = self.replies.calls(self.settings, method, args)
        for call in calls:
            self.deliver(pickle.dumps(call))
        (answer,) = self.replies.collect(calls, TIMEOUT_S)
        return answer

    def deliver(self, blob: bytes) -> None:
        self.pipe.send(blob)
        assert self.pipe.poll(TIMEOUT_S)
        assert self.pipe.recv() == "done"

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(TIMEOUT_S)
        self.process.close()
        self.pipe.close()
        self.replies.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    path = tmp_path_factory.mktemp("model")
    build_tiny_qwen3(path)
    ranks = Ranks(str(path))
    yield ranks
    ranks.close()


def test_calls_reach_the_rank_and_its_answers_and_errors_come_back(ranks: Ranks) -> None:
    joined = ranks.ask("join", os.getpid())
    assert isinstance(joined, RankProcess)
    assert (joined.rank, joined.pid) == (0, ranks.process.pid)
    ranks.replies.connected()
    assert not Path(ranks.replies._endpoint.removeprefix("ipc://")).exists()
    layout = ranks.ask("layout")
    assert {name.removeprefix("inner.") for name in ranks.ask("addresses")} == {
        meta.name for meta in layout.tensors
    }
    assert layout.buffers
    assert layout.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    refused = ranks.ask("load", 1, 1.0)
    assert "connect first" in str(refused)
    failed = ranks.ask("no_such_method")
    assert isinstance(failed, EngineError)
    assert failed.rank == 0


def test_what_is_no_call_does_not_end_the_process(ranks: Ranks) -> None:
    ranks.deliver(b"no pickle")
    with pytest.raises(EngineError, match="rank 0, failed in call: no answer came"):
        ranks.replies.collect(ranks.replies.calls(ranks.settings, "settle", ()), 0.01)
    late = ranks.replies.calls(ranks.settings, "addresses", ())
    ranks.deliver(pickle.dumps(late[0]))
    assert ranks.ask("settle") is None  # and not what nobody waited for


class Fp8LinearMethod: ...


class UnquantizedLinearMethod: ...


class UnquantizedFusedMoEMethod:
    def __init__(self, use_flashinfer_trtllm_moe: bool) -> None:
        self.use_flashinfer_trtllm_moe = use_flashinfer_trtllm_moe


@pytest.mark.parametrize(
    ("method", "attributes", "reason"),
    [
        (None, {}, ""),
        (UnquantizedLinearMethod(), {}, ""),
        (UnquantizedLinearMethod(), {"use_intel_amx_backend": True}, "packed for AMX"),
        (UnquantizedFusedMoEMethod(False), {}, ""),
        (UnquantizedFusedMoEMethod(True), {}, "rearrange experts"),
        (Fp8LinearMethod(), {}, "layer: Fp8LinearMethod may repack weights"),
    ],
)
def test_only_layers_that_keep_what_they_load_are_written_live(
    method: object, attributes: dict[str, bool], reason: str
) -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.layer.quant_method = method
    for name, value in attributes.items():
        setattr(model.layer, name, value)
    found = stored_otherwise(model, torch.device("cpu"))
    assert bool(found) == bool(reason)
    assert reason in found
    model.post_load_weights = lambda: None
    assert "derives" in stored_otherwise(model, torch.device("cpu"))


def test_quantized_weights_need_an_sglang_that_processes_them_again() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.layer.quant_method = Fp8LinearMethod()
    for repacks in (True, False):
        settings = RankSettings("e0", "", "bfloat16", repacks)
        host = sglang_worker._Host(model, torch.device("cpu"), settings)
        if repacks:
            assert host.loader()
        else:
            with pytest.raises(EngineError, match=r"Fp8LinearMethod.*before 0\.5\.21"):
                host.loader()


def test_ranks_meet_on_a_port_that_nobody_has() -> None:
    """Neither a socket that lives, nor what the kernel hands out while SGLang starts."""
    port = sglang_api._unasked_port()
    with socket.socket() as somebody:
        somebody.bind(("", port))
        other = sglang_api._unasked_port()
    assert port != other
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(port, other) < lowest
