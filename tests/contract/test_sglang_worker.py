"""A rank as SGLang runs it: in a process of its own, called through the weight loader, answering on a socket.

SGLang itself is not in it: the process calls the loader as its scheduler does, with a model of
transformers that has a loader of its own. `test_engines.py` runs it in SGLang, where that is installed.
"""

from __future__ import annotations

import dataclasses
import pickle
import socket
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import numpy as np
import psutil
import pytest
import torch
import zmq
from torch import nn
from transformers import AutoModelForCausalLM

from tests.forked import forking
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.engines.sglang import api as sglang_api
from weightsync.engines.sglang import rank_calls as sglang_channel
from weightsync.engines.sglang import worker as sglang_worker
from weightsync.engines.sglang.api import pack
from weightsync.engines.sglang.draft import Speculation
from weightsync.engines.sglang.rank_calls import Call, Replies
from weightsync.engines.sglang.storage import stored_otherwise
from weightsync.engines.sglang.worker import RankSettings, receive
from weightsync.errors import ConfigError, EngineError, StateError, WireError
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.draft import DRAFT, Draft
from weightsync.plan.layout.formats import Format
from weightsync.plan.layout.layout_table import LayoutTable, SegmentTable
from weightsync.plan.layout.segment import MeshPlace
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, StoredTable
from weightsync.protocol.handles import DeviceHandle, StoredExport
from weightsync.protocol.messages import Attached, LiveDigest, Loaded
from weightsync.protocol.timing import Span

TIMEOUT_S = patient(60)
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
    """What SGLang's before 0.5.21 does with each request: what is for the draft goes to the target, too."""
    model, draft = Served(path), Served(path)
    with torch.inference_mode():
        for blob in iter(pipe.recv, None):
            if b"no pickle" not in blob and pickle.loads(blob).to_draft:
                receive(draft, [(blob, NOTHING)])
            receive(model, [(blob, NOTHING)])
            pipe.send("done")


class Ranks:
    def __init__(self, path: str) -> None:
        speculation = Speculation("EAGLE", path, None)
        self.settings = RankSettings("e0", path, "float32", speculation=speculation)
        self.replies = Replies("e0", 1)
        self.pipe, theirs = forking().Pipe()
        self.process = forking().Process(target=scheduler, args=(path, theirs))
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: object) -> object:
        if method == "join":
            self.deliver(pickle.dumps(self.calls(method, *args, to_draft=True)[0]))
        calls = self.calls(method, *args)
        for call in calls:
            self.deliver(pickle.dumps(call))
        (answer,) = self.replies.collect(calls, TIMEOUT_S)
        return answer

    def calls(self, method: str, *args: object, to_draft: bool = False) -> list[Call]:
        return self.replies.calls(self.settings, method, pack(args), to_draft)

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
    engine = psutil.Process(ranks.process.pid).ppid()  # the process that has forked the rank
    assert ranks.ask("join", engine + 1) is None
    joined = ranks.ask("join", engine)
    assert isinstance(joined, RankProcess)
    assert (joined.rank, joined.pid) == (0, ranks.process.pid)
    ranks.replies.connected()
    assert not Path(ranks.replies.endpoint.removeprefix("ipc://")).exists()
    layout = ranks.ask("layout").rank_layout()
    assert {name.removeprefix("inner.") for name in ranks.ask("addresses")} == {
        meta.name for meta in layout.tensors
    }
    assert layout.buffers
    assert layout.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    refused = ranks.ask("load", 1, 1.0)
    assert type(refused) is StateError
    assert str(refused) == "a rank is not attached: connect first"
    failed = ranks.ask("no_such_method")
    assert type(failed) is EngineError
    assert (failed.phase, failed.rank) == ("no_such_method", 0)
    assert "AttributeError" in failed.cause


def test_a_draft_is_compared_or_is_part_of_the_layout(ranks: Ranks) -> None:
    path = ranks.settings.model_path
    untreated = ranks.ask("layout").rank_layout()
    assert untreated.draft == Draft("EAGLE", path)
    assert ranks.ask("treat", "frozen") is None
    frozen = ranks.ask("layout").draft
    assert frozen.digest
    assert frozen.num_tensors >= len(untreated.tensors)  # a tied head has two names
    assert ranks.ask("treat", "trained") is None
    layout = ranks.ask("layout").rank_layout()
    names = {meta.name for meta in untreated.tensors}
    assert {meta.name for meta in layout.tensors} == names | {DRAFT + name for name in names}
    assert {buffer.name.startswith(DRAFT) for buffer in layout.buffers} == {True, False}
    assert layout.draft.trained
    assert ranks.ask("treat", None) is None
    assert ranks.ask("layout").rank_layout() == untreated


def test_what_is_no_call_does_not_end_the_process(ranks: Ranks) -> None:
    ranks.deliver(b"no pickle")
    with pytest.raises(EngineError, match="rank 0, failed in call: no answer came"):
        ranks.replies.collect(ranks.calls("settle"), 0.01)
    late = ranks.calls("addresses")
    ranks.deliver(pickle.dumps(late[0]))
    assert ranks.ask("settle") is None  # and not what nobody waited for


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


META = TensorMeta("w", "float32", (2, 3))
LAYOUT = RankLayout(
    (META,),
    (Segment("w", Box((0, 0), (1, 3)), "live", 12, (12, 4)),),
    (("head", "w"),),
    (TensorMeta("live", "float32", (1, 3)),),
    (("live", 0, 12),),
    "cuda:GPU-1",
)
WHOLE = RankLayout((META,), (Segment.whole(META),))
HANDLES = {"live": DeviceHandle("cuda:GPU-1", 7, b"ipc", 512, 12)}
MEMORY = DeviceMemory.of(HANDLES)
BLOCKS = Format(rule="fp8", values="float8_e4m3fn", block=(128, 128))


@pytest.fixture
def replies() -> Iterator[Replies]:
    replies = Replies("e0", 1)
    yield replies
    for each in sglang_channel.sockets.values():
        each.close()
    sglang_channel.sockets.clear()
    replies.close()


def answered(replies: Replies, method: str, *outcomes: object) -> object:
    """What the engine makes of the last of `outcomes`, which this process answers in the rank's place."""
    calls = replies.calls(None, method, b"")
    for outcome in outcomes:
        sglang_channel.reply(calls[0], outcome)
    return replies.collect(calls, TIMEOUT_S)[0]


@pytest.mark.parametrize(
    ("method", "outcome"),
    [
        ("join", None),
        ("join", RankProcess(0, 7, 99)),
        ("addresses", {"w": 1 << 47}),
        ("export", DeviceMemory.of({"w": DeviceHandle("cuda:0", 7, b"ipc", 0, 8)})),
        ("attach", Attached("ab", None)),
        ("settle", None),
        ("call_slots", None),
    ],
)
def test_what_a_rank_returns_arrives_as_it_was(replies: Replies, method: str, outcome: object) -> None:
    assert answered(replies, method, outcome) == outcome


@pytest.mark.parametrize("mesh", [None, MeshPlace((1,), (0,), {"w": ()})])
@pytest.mark.parametrize("layout", [LAYOUT, WHOLE])
def test_a_layout_arrives_as_it_was(replies: Replies, layout: RankLayout, mesh: MeshPlace | None) -> None:
    table = LayoutTable.of(dataclasses.replace(layout, mesh=mesh))
    arrived = answered(replies, "layout", table)
    assert isinstance(arrived, LayoutTable)
    assert arrived.rank_layout() == layout
    assert arrived.outline() == table.outline()
    assert bool(arrived.stated) is bool(mesh and layout is WHOLE)


def test_memory_that_a_rank_exports_arrives_as_it_was(replies: Replies) -> None:
    arrived = answered(replies, "attach", Attached("ab", MEMORY, casts=True))
    assert isinstance(arrived, Attached)
    assert arrived.export
    assert arrived.export.handles() == HANDLES
    assert dataclasses.replace(arrived, export=None) == Attached("ab", None, casts=True)


def test_live_parameters_that_a_rank_exports_arrive_as_they_were(replies: Replies) -> None:
    stored = StoredExport(WHOLE, {"w": "uint8"}, {"w.weight": BLOCKS})
    reads = LayoutTable.of(LAYOUT)
    live = LiveMemory("kind", MEMORY, StoredTable.of(stored), reads)
    arrived = answered(replies, "attach", Attached("ab", None, live))
    assert isinstance(arrived, Attached)
    assert arrived.live
    export = arrived.live.export(None)
    assert (export.kind, export.memory.handles(), export.places) == ("kind", HANDLES, stored)
    assert arrived.live.reads
    assert arrived.live.reads.rank_layout() == LAYOUT
    assert arrived.live.reads.outline() == reads.outline()


@pytest.mark.parametrize("dtype", ["|O", "<f8", "<u8", "no dtype"])
def test_columns_of_another_dtype_are_refused(replies: Replies, dtype: str) -> None:
    table = LayoutTable.of(LAYOUT)
    segments = {field.name: getattr(table.listed, field.name) for field in dataclasses.fields(SegmentTable)}
    forged = dataclasses.replace(table, listed={**segments, "tensor": (dtype, (1,), bytes(8))})
    with pytest.raises(WireError, match=r"not what rank 0 returns.*listed.tensor"):
        answered(replies, "attach", Attached("ab", None, LiveMemory("kind", MEMORY, reads=forged)))


def test_what_a_rank_loaded_arrives_as_it_was(replies: Replies) -> None:
    digests = np.array([1, (1 << 64) - 1], np.uint64)
    spans = [Span("load", 1e9, 0.5), Span("verify", 1e9, 1.0)]
    loaded = Loaded(digests, spans, LiveDigest("bf16", "ab"), are_live=False, are_compared=True)
    arrived = answered(replies, "load", loaded)
    assert isinstance(arrived, Loaded)
    assert arrived.digests.dtype == np.uint64
    assert arrived.digests.flags.writeable
    assert arrived.digests.tolist() == digests.tolist()
    assert dataclasses.replace(arrived, digests=digests) == loaded


@pytest.mark.parametrize(
    ("method", "outcome"),
    [("settle", 1), ("layout", None), ("addresses", {"w": "here"}), ("load", (b"", ())), ("join", META)],
)
def test_what_the_method_does_not_return_is_a_wire_error(
    replies: Replies, method: str, outcome: object
) -> None:
    with pytest.raises(WireError, match=f"not what rank 0 returns from {method}"):
        answered(replies, method, outcome)


def test_what_a_stranger_sends_is_refused_and_not_unpickled(
    replies: Replies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    calls = replies.calls(None, "addresses", b"")
    forged = dataclasses.replace(calls[0], secret=bytes(32))
    beyond = dataclasses.replace(calls[0], rank=1)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(calls[0].endpoint)
        for frames in ([b"0", b"0", trap], [trap], [b""], [b"0"] * 1000):
            stranger.send_multipart(frames)
        for call in (forged, beyond):
            sglang_channel.reply(call, {"w": 666})
        with pytest.raises(EngineError, match="no answer came"):
            replies.collect(calls, 1.0)
        assert sum("refused an answer" in record.getMessage() for record in caplog.records) == 6
        sglang_channel.reply(calls[0], {"w": 1})
        assert replies.collect(calls, TIMEOUT_S) == [{"w": 1}]
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()  # the trap works


class Fp8LinearMethod: ...


class UnquantizedLinearMethod: ...


class UnquantizedFusedMoEMethod:
    def __init__(self, use_flashinfer_trtllm_moe: bool, interleaved: bool = False) -> None:
        self.use_flashinfer_trtllm_moe = use_flashinfer_trtllm_moe
        self.w13_swiglu_interleaved = interleaved


@pytest.mark.parametrize(
    ("method", "attributes", "reason"),
    [
        (None, {}, ""),
        (UnquantizedLinearMethod(), {}, ""),
        (UnquantizedLinearMethod(), {"use_intel_amx_backend": True}, "packed for AMX"),
        (UnquantizedFusedMoEMethod(False), {}, ""),
        (UnquantizedFusedMoEMethod(True), {}, "rearrange experts"),
        (UnquantizedFusedMoEMethod(False, True), {}, "leave SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED unset"),
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


def test_weights_that_are_processed_once_are_refused(tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path)
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.layer.quant_method = Fp8LinearMethod()
    settings = RankSettings("e0", str(tmp_path), "bfloat16")
    with pytest.raises(ConfigError, match=r"Fp8LinearMethod.*no load makes up for it"):
        sglang_worker.SglangHost(model, torch.device("cpu"), settings).checkpoint()


class Latent(nn.Module):
    """Fuses two tensors that come in one call, and derives a third, as DeepSeek does."""

    packed_modules_mapping = MappingProxyType({"fused": ["q_a_proj", "kv_a_proj"]})

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"fused": nn.Linear(2, 3, bias=False)})
        self.attn.derived, self.in_place = torch.zeros(3, 2), in_place

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        came = {name.split(".")[1]: tensor for name, tensor in weights}
        if came.keys() == {"q_a_proj", "kv_a_proj"}:
            self.attn["fused"].weight.copy_(torch.cat([came["q_a_proj"], came["kv_a_proj"]]))

    def post_load_weights(self) -> None:
        made = 2 * self.attn["fused"].weight
        self.attn.derived = self.attn.derived.copy_(made) if self.in_place else made


def latent(in_place: bool, path: Path) -> tuple[Latent, sglang_worker.SglangHost]:
    build_tiny_qwen3(path)
    model = Latent(in_place)
    settings = RankSettings("e0", str(path), "bfloat16")
    return model, sglang_worker.SglangHost(model, torch.device("cpu"), settings)


@torch.no_grad()
def test_each_load_fuses_what_came_apart_and_derives_again(tmp_path: Path) -> None:
    model, host = latent(True, tmp_path)
    host.checkpoint()
    for value in (1.0, 2.0):
        loader = host.loader(stored=False)
        for name, rows in (("attn.q_a_proj.weight", 1), ("attn.kv_a_proj.weight", 2)):
            loader.load([(name, torch.full((rows, 2), value))])
        loader.finish()
        assert model.attn["fused"].weight.eq(value).all()
        assert model.attn.derived.eq(2 * value).all()
    loader = host.loader(stored=False)
    loader.load([("attn.q_a_proj.weight", torch.ones(1, 2))])
    with pytest.raises(RuntimeError, match=r"left out attn\.fused\.weight: 1 tensors got nothing"):
        loader.finish()


def test_a_model_that_derives_tensors_in_other_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"derives attn\.derived in other memory each time"):
        latent(False, tmp_path)[1].checkpoint()


def test_a_layer_that_keeps_a_copy_of_its_weight_is_refused(tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path)
    model = nn.Module()
    model.gate = nn.Linear(2, 2)
    settings = RankSettings("e0", str(tmp_path), "bfloat16")
    host = sglang_worker.SglangHost(model, torch.device("cpu"), settings)
    assert host.checkpoint().tensors
    model.gate.register_buffer("_weight_fp32", None, persistent=False)
    with pytest.raises(ConfigError, match=r"gate\._weight_fp32 once and no update reaches it"):
        host.checkpoint()


def test_ranks_meet_on_a_port_that_nobody_has() -> None:
    """Neither a socket that lives, nor what the kernel hands out while SGLang starts."""
    port = sglang_api.unasked_port()
    with socket.socket() as somebody:
        somebody.bind(("", port))
        other = sglang_api.unasked_port()
    assert port != other
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(port, other) < lowest
