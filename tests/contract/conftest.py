"""An engine with a holder beside it that the tests play themselves."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers import PreTrainedModel

from tests.contract import sglang_hooks
from tests.contract.request_loops import FakeLlm, FakeServer, loop_of
from tests.gpu.qwen3_models import save_qwen3
from tests.models import build_tiny_qwen3, greedy, save_tokenizer
from tests.patience import patient
from tests.rank_layouts import rank_layouts
from tests.vllm_imports import import_vllm
from weightsync.channel.feed import HolderFeed
from weightsync.channel.wire import Cancel, Ready
from weightsync.config import Components
from weightsync.engines import Engine, HasComponents, make_engine
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.errors import StateError
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.layout.draft import DRAFT
from weightsync.protocol.messages import Digests

TIMEOUT_S = patient(120)
BUCKET_BYTES = 12 << 10  # smaller than the larger tensors, so that these come in pieces
OPTIONS = {
    "torch": {"enable_sleep_mode": True},
    "vllm": {"max_model_len": 128, "max_num_seqs": 16},
    "sglang": {
        "device": "cpu",
        "custom_weight_loader": [sglang_hooks.LOADER],
        "disable_cuda_graph": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": 16384,
        "max_running_requests": 16,
    },
}
# Without CUDA graphs, for a replayed graph runs no hook. tests/gpu has them.
GPU_OPTIONS = {
    "torch": {"device": "cuda"},
    "vllm": {"enforce_eager": True, "gpu_memory_utilization": 0.2},
    "sglang": {
        "device": "cuda",
        "attention_backend": "triton",
        "enable_deterministic_inference": True,
        "mem_fraction_static": 0.2,
    },
}
# By how much, in standard deviations of the logits, the token that an engine takes may lie below the best.
# vLLM's float32 attention on GPUs rounds its products to TF32: each token. SGLang serves in bfloat16, where
# now and then another expert is taken: on average. Another model's tokens lie about 3 below.
SLACK = {"vllm": 0.05, "sglang": 0.5}
# By how much a log-probability may be off: in float32, in TF32, in bfloat16.
LOGPROB_SLACK = {"torch": 1e-4, "vllm": 2e-2, "sglang": 0.5}
ENDED = [5, 6, 7, 8]
"""A prompt whose greedy completion by the rig's first model has the model's own end token."""
# SGLang has kernels for models of a real one's head size and dtype only: its buckets are larger, too.
SGLANG_BUCKET_BYTES = 1 << 20


def source_layout(tensors: Mapping[str, torch.Tensor], tied: tuple[tuple[str, str], ...]) -> RankLayout:
    metas = tuple(
        TensorMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()
    )
    segments = tuple(
        Segment(
            m.name,
            Box((0,) * len(m.shape), m.shape),
            m.name,
            0,
            tuple(m.itemsize * s for s in tensors[m.name].stride()),
        )
        for m in metas
    )
    return RankLayout(metas, segments, tied)


class Rig:
    """An engine, the models that it is fed with, and the holder's end of its feed: buckets in `memory`."""

    def __init__(
        self,
        kind: str,
        moe: bool,
        memory: str,
        folder: Path,
        components: Components = MappingProxyType({}),
        draft: Mapping[str, torch.Tensor] = MappingProxyType({}),
        models: Sequence[PreTrainedModel] = (),
        **more: object,
    ) -> None:
        """`models`: two that are saved in folders ``1`` and ``2``, in place of the rig's own."""
        self.kind, self.on_gpu, self.draft = kind, memory == "device", draft
        self.folder, self.dtype, bucket_bytes = folder, "float32", BUCKET_BYTES
        if kind == "sglang":
            self.dtype, bucket_bytes = "bfloat16", SGLANG_BUCKET_BYTES
            self.models = [save_qwen3(folder / str(seed), "moe" if moe else "tied", seed) for seed in (1, 2)]
        else:
            self.models = [*models] or [build_tiny_qwen3(folder / str(seed), moe, seed) for seed in (1, 2)]
        if not models:
            (said,) = greedy(self.models[0], [ENDED])
            self.end = said[3]
            save_tokenizer(folder / "1", [self.end], self.models[0].config.vocab_size)
        if kind == "vllm":
            import_vllm()
        options = OPTIONS[kind] | (GPU_OPTIONS[kind] if self.on_gpu else {}) | more
        self.engine: Engine = make_engine(kind, str(folder / "1"), "e0", options)
        if isinstance(self.engine, HasComponents):
            self.engine.use_components(components)
        self.layout = rank_layouts(self.engine)
        self.threads = ThreadPoolExecutor(4)
        self.attempt = 0
        self._wanted: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
        source = source_layout(self.held(self.models[0]), named_tensors(self.models[0])[1])
        self.plan = make_plan(
            Layout.from_ranks([source]),
            {"e0": Layout.from_ranks(self.layout)},
            Members(2, (0,), (("e0", (1,)),)),
            bucket_bytes=bucket_bytes,
            max_staging_bytes=8 << 20,
        )
        create = DeviceBuffer.create if self.on_gpu else SharedBuffer.create
        self.slots = tuple(create(bucket_bytes) for _ in range(self.plan.slots))
        self.feed: HolderFeed | None = None
        self.connect(self.plan)

    def held(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return what a trainer of `model`, and of the rig's draft, holds."""
        draft = {f"{DRAFT}{name}": tensor for name, tensor in self.draft.items()}
        return {**named_tensors(model)[0], **draft}

    def connect(self, plan: Plan) -> None:
        """A new epoch: the engine joins with `plan`."""
        if self.feed:
            self.feed.close()
        self.plan = plan
        self.feed = HolderFeed("h1", "e0", tuple(slot.handle for slot in self.slots), None, -1)
        joined = self.threads.submit(self.engine.attach, plan, [self.feed.ticket], TIMEOUT_S)
        self.feed.accept(plan.digest(), TIMEOUT_S)
        attached = joined.result(TIMEOUT_S)
        assert [each.plan_digest for each in attached] == [plan.digest()]
        self.exported = [each.export is not None for each in attached]

    def load(self, model: PreTrainedModel, num_buckets: int | None = None) -> Digests:
        """Feed the weights of `model`; give up after `num_buckets`, if given."""
        assert self.feed is not None
        self.attempt += 1
        tensors = self.held(model)
        loaded = self.threads.submit(self.engine.load, self.attempt, TIMEOUT_S)
        for bucket in list(self.plan.buckets())[:num_buckets]:
            slot = self.slots[bucket.index % len(self.slots)].tensor
            for piece in bucket.pieces:
                meta = self.plan.tensors[piece.tensor]
                cut = tensors[meta.name].detach()[piece.box.slices()].contiguous()
                slot[piece.offset : piece.offset + piece.nbytes] = cut.view(-1).view(torch.uint8)
            if self.on_gpu:
                torch.cuda.synchronize()
            self.feed.send(Ready(self.attempt, bucket.index))
            self.feed.wait_done(self.attempt, bucket.index, TIMEOUT_S)
            slot.fill_(0xAA)  # whoever kept a view of it has garbage now
        if num_buckets is not None:
            self.feed.send(Cancel(self.attempt, "the test gave up"))
        (self.loaded,) = loaded.result(TIMEOUT_S)
        return self.loaded.digests

    def update(self, model: PreTrainedModel, version: int) -> Digests:
        """A whole update, as the controller runs it."""
        self.engine.pause("keep", TIMEOUT_S)
        digests = self.load(model)
        self.engine.resume(version)
        return digests

    def generate(self, prompts: list[list[int]], max_tokens: int = 16) -> Future:
        sampling = {"max_tokens": max_tokens, "temperature": 0.0}
        return self.threads.submit(self.engine.generate, prompts, sampling)

    def serves(
        self, model: PreTrainedModel, prompts: list[list[int]], tokens: list[list[int]], num_tokens: int = 16
    ) -> bool:
        """Whether `tokens` are the greedy ones of `model`, as far as the engine's arithmetic can tell."""
        if self.kind == "torch" or (self.kind == "vllm" and not self.on_gpu):
            return tokens == [self._greedy(model, prompt, num_tokens) for prompt in prompts]
        assert len(tokens) == len(prompts)
        return all(
            len(row) == num_tokens and _is_greedy(model, prompt, row, self.kind)
            for prompt, row in zip(prompts, tokens, strict=True)
        )

    def _greedy(self, model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
        """Return what `greedy` returns. Each model is asked once, since its weights do not change."""
        key = self.models.index(model), tuple(prompt), num_tokens
        if key not in self._wanted:
            (self._wanted[key],) = greedy(model, [prompt], num_tokens)
        return self._wanted[key]

    @contextmanager
    def stopped_at(self, forward: int) -> Iterator[tuple[sglang_hooks.Event, sglang_hooks.Event]]:
        """While a generate runs, its thread stops at that forward pass: (arrived, go on)."""
        if self.kind == "sglang":
            with sglang_hooks.stopped_at(self.engine, forward, self.folder) as events:
                yield events
            return
        arrived, go_on, passes = threading.Event(), threading.Event(), iter(range(1, 1 << 20))

        def hook(*_: object) -> None:
            if next(passes) == forward:
                if self.kind == "vllm":
                    self._note_calls()
                arrived.set()
                assert go_on.wait(TIMEOUT_S)

        handle = self._module().register_forward_pre_hook(hook)
        try:
            yield arrived, go_on
        finally:
            go_on.set()
            handle.remove()

    def is_asked_to_pause(self) -> bool:
        if self.kind == "vllm":
            return self.asked.is_set()
        return not self.engine.serving()

    def _note_calls(self) -> None:
        """Set `asked` at the next call into the event loop, which waits while vLLM steps."""
        events, self.asked = self.engine.loop.server.loop, threading.Event()
        call = events.call_soon_threadsafe

        def noted(*args: object, **named: object) -> object:
            events.call_soon_threadsafe = call
            handle = call(*args, **named)
            self.asked.set()
            return handle

        events.call_soon_threadsafe = noted

    def kept(self) -> Sequence[int]:
        """How many tokens a request may have when it is paused at its sixth pass.

        A step that is launched when the pause comes may count, or be thrown away with what it cached. SGLang
        may take requests in one after another, each in a pass of its own.
        """
        if self.kind == "sglang":
            return (3, 4, 5, 6)
        return (5, 6) if self.on_gpu else (6,)

    def without_last_bucket(self) -> Plan:
        return dataclasses.replace(self.plan, bucket_step=self.plan.bucket_step[:-1])

    @property
    def has_tokenizer(self) -> bool:
        """SGLang before 0.5.21 has none: it would not say which version made a token that comes late."""
        return self.kind != "sglang" or self.engine.loop.server.forgets

    @property
    def sleeps(self) -> bool:
        """vLLM has one engine that sleeps in a process, and SGLang wants a package: tests/gpu has them."""
        return self.kind == "torch"

    def live_nbytes(self) -> int:
        """What the memory of the weights takes now."""
        return sum(each.untyped_storage().nbytes() for each in self._module().parameters())

    def close(self) -> None:
        self.engine.close()
        self.engine.close()
        with pytest.raises(StateError, match="closed"):
            self.engine.generate([[1]], {})
        self.feed.close()
        for slot in self.slots:
            slot.close()
        self.threads.shutdown()

    def _module(self) -> torch.nn.Module:
        if self.kind == "vllm":
            return self.engine.call(
                lambda llm: llm.model_executor.driver_worker.worker.model_runner.get_model()
            )
        return self.engine.model


@torch.no_grad()
def _is_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int], kind: str) -> bool:
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps = (logits.amax(1) - taken) / logits.std(1)
    return bool((gaps.mean() if kind == "sglang" else gaps.max()) <= SLACK[kind])


def _params() -> Iterator[object]:
    for kind in OPTIONS:
        absent = not importlib.util.find_spec("transformers" if kind == "torch" else kind)
        for memory in ("host", "device"):
            # These take a GPU where there is one; their buckets are not in host memory then.
            elsewhere = kind != "torch" and memory == "host" and torch.cuda.is_available()
            for model in ("dense", "moe"):
                yield pytest.param(
                    (kind, model == "moe", memory),
                    id=f"{kind}-{model}" + ("-gpu" if memory == "device" else ""),
                    marks=[
                        pytest.mark.skipif(absent, reason=f"{kind} is not installed"),
                        pytest.mark.skipif(elsewhere, reason=f"{kind} runs on the GPU here"),
                        *([pytest.mark.gpu, pytest.mark.timeout(300)] if memory == "device" else []),
                        *([pytest.mark.faults] if (kind, model, memory) == ("vllm", "moe", "host") else []),
                    ],
                )


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def loop(fake: FakeServer | FakeLlm, threads: ThreadPoolExecutor) -> Iterator[RequestLoop]:
    """Closed before `threads` are, or a failed test would wait for them for ever. Tests make the `fake`."""
    loop = loop_of(fake)
    yield loop
    fake.permits.release(1000)
    loop.thread.close(TIMEOUT_S)


@pytest.fixture(scope="module", params=_params())
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    kind, moe, memory = request.param
    rig = Rig(kind, moe, memory, tmp_path_factory.mktemp("models"))
    with pytest.raises(StateError, match="no committed version"):
        rig.engine.generate([[1, 2, 3]], {"max_tokens": 1})
    with pytest.raises(StateError, match="no whole weights"):
        rig.engine.resume(1)
    yield rig
    rig.close()
