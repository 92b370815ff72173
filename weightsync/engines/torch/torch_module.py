"""Runs transformers' own model in this process: slow and exact, wherever torch runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightsync.channel.feed import EngineFeed
from weightsync.config import load_dataclass
from weightsync.engines.base import Completion, Prompts, Rollout
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.serving.checks import check_version
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.texts import Tokenizer, token_ids, with_texts
from weightsync.engines.torch.batch_watch import BatchWatch
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    StateError,
    TransportError,
    WeightSyncError,
    WireError,
)
from weightsync.memory.addresses import AddressGuard
from weightsync.memory.file_names import FileNames
from weightsync.memory.offload import Offload
from weightsync.memory.tensors import byte_strides, device_id, metas_of, named_tensors
from weightsync.plan import Plan, RankLayout, Segment
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

_IN_ONE_BATCH = "leave it out: this engine draws one token per prompt and step"
_REFUSED = {
    "max_new_tokens": "give max_tokens",
    "max_length": "give max_tokens",
    "do_sample": "give temperature",
    "eos_token_id": "give stop_token_ids",
    "stop_strings": "give stop",
    "num_return_sequences": "give n",
    "pad_token_id": "leave it out: padding is cut off",
    "max_time": "leave it out: no finish reason would say it",
    **dict.fromkeys(("num_beams", "prompt_lookup_num_tokens", "return_dict_in_generate"), _IN_ONE_BATCH),
}
"""Settings that are refused, with remedies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """Options of this engine. One process holds the whole model, so `tensor_parallel_size` is 1.

    With `device` ``cuda``, the model is on the process's current GPU. With `enable_sleep_mode`, the engine
    copies buckets itself: memory that a holder has mapped could not be released. With `trust_remote_code`, a
    model's own code runs, if it has any. `revision` is of a model on the hub.

    Raises:
        ConfigError: naming the field, as ``options.<field>``.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel_size: int = 1
    enable_sleep_mode: bool = False
    trust_remote_code: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("options.device", self.device, "torch finds no GPU here: use cpu")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                "options.tensor_parallel_size", self.tensor_parallel_size, "torch runs on one rank"
            )


class TorchEngine:
    """An engine of one rank. Modes ``keep`` and ``wait`` let a running `generate` end.

    Attributes:
        model: the live model: updates write into its parameters and buffers.
    """

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        """Build the model of `model_path`'s config without reading weights."""
        from transformers import GenerationConfig

        settings = load_dataclass(TorchOptions, options, field="options")
        check_version("torch", settings.device)
        self._folder = ModelFolder(model_path, settings.trust_remote_code, settings.revision)
        self._name = name
        self._device, self._sleeps = torch.device(settings.device), settings.enable_sleep_mode
        model = self._folder.build(getattr(torch, settings.dtype))
        self.model: PreTrainedModel = model.to(self._device).eval()
        # Otherwise the checkpoint's sampling defaults would apply where a call sets nothing.
        self.model.generation_config = GenerationConfig()
        self._gate = _Gate()
        self._whole = False
        self._feed: EngineFeed | None = None
        self._busy = threading.Lock()
        self._plan: Plan | None = None
        self._writer: LiveWriter | None = None
        self._guard: AddressGuard | None = None
        self._written: AddressGuard | None = None  # guards the memory that the writer writes
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._layout: RankLayout
        self._asleep: Offload | None = None

    def layout(self) -> Sequence[RankLayout]:
        """Return a layout in which each live tensor is one whole buffer."""
        if not (self._guard and self._guard.as_before(self.model)):
            self._tensors, tied = named_tensors(self.model)
            self._guard = AddressGuard(self.model, self._tensors)
            self._layout = self._describe(tied)
        return [self._layout]

    def _describe(self, tied: tuple[tuple[str, str], ...]) -> RankLayout:
        metas = metas_of(self._tensors)
        segments = tuple(Segment.whole(meta, byte_strides(self._tensors[meta.name])) for meta in metas)
        layout = RankLayout(metas, segments, tied, buffers=metas, device=device_id(self._device))
        given = [*self._tensors, *(alias for alias, _ in tied)]
        return layout.renamed(FileNames.of(self.model, given).names)

    def can_export(self) -> Sequence[bool]:
        """Return whether `attach` would export the live memory. An engine that can sleep does not."""
        self.layout()
        return [not self._sleeps and exported(self._tensors) is not None]

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect to the holder; export the live memory unless the engine sleeps."""
        (ticket,) = tickets
        self._detach()
        (layout,) = self.layout()
        self._feed, self._plan = EngineFeed.open(ticket, plan, timeout_s, layout, self._busy), plan
        if self._sleeps:
            return [Attached(self._feed.plan_digest, None, casts=self._feed.casts)]
        self._writer = self._open_writer()
        return [Attached(self._feed.plan_digest, self._writer.export(), casts=self._feed.casts)]

    def _open_writer(self) -> LiveWriter:
        assert self._feed is not None
        assert self._plan is not None
        (layout,) = self.layout()
        self._written = self._guard
        return LiveWriter(
            self._plan,
            layout,
            self._tensors,
            self._feed.slots,
            views=self._feed.views,
            casts=self._feed.casts,
        )

    def pause(self, mode: str, timeout_s: float) -> None:
        """Wait for the running `generate`, with ``abort`` for one token. Later calls wait for `resume`."""
        if not self._gate.shut(timeout_s, cut=mode == "abort"):
            raise DeadlineError(f"pause ({mode})", (f"engine {self._name}",), timeout_s)
        self._wake()

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the memory of the weights."""
        if not self._sleeps:
            remedy = f"engine {self._name} can sleep (level {level}) if started with true"
            raise ConfigError("options.enable_sleep_mode", False, remedy)
        if self._asleep is None:
            self.pause(mode, timeout_s)
            self._writer, tensors = None, named_tensors(self.model)[0].values()
            try:
                self._asleep = Offload(tensors, keep=tensors if level == 1 else ())
            except (RuntimeError, StateError) as error:  # no page-locked memory, or tensors of foreign memory
                raise EngineError(self._name, "sleep", str(error)) from error
            self._whole = self._whole and level == 1

    def _wake(self) -> None:
        if self._asleep:
            self._asleep.undo()
            self._asleep = None

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Write one attempt's buckets straight into the live parameters."""
        if self._feed is None:
            raise StateError(f"engine {self._name} is not attached: connect first")
        try:
            writer = self._begin()
        except StateError as error:
            self._feed.refuse(attempt, error)
            raise
        try:
            digests = self._feed.receive(attempt, writer, timeout_s)
        except WeightSyncError as error:
            self._gate.invalidate()
            if isinstance(error, TransportError | WireError):
                raise EngineError(self._name, "load", str(error)) from error
            raise
        self._whole = True
        return [Loaded(digests, self._feed.spans)]

    def _begin(self) -> LiveWriter:
        if not self._gate.quiet or self._asleep:
            doing = "asleep" if self._asleep else "serving"
            raise StateError(f"engine {self._name} is {doing}: pause it first")
        self._whole = False
        writer = self._writer = self._writer or self._open_writer()
        assert self._written is not None
        unmoved = self._written.as_before(self.model)
        writer.begin(None if unmoved else named_tensors(self.model)[0])
        return writer

    def resume(self, version: int) -> None:
        """Serve `version`. Raises StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
        self._wake()
        self._gate.open(version)

    def serving(self) -> int:
        """Return the version being served, 0 while paused."""
        return self._gate.serving

    def generate(self, prompts: Prompts, sampling: Mapping[str, Any]) -> Rollout:
        """Complete all prompts in one batch; calls run one after another."""
        settings = Sampling.of(sampling)
        if settings.adapter:
            raise ConfigError(
                "sampling.adapter", settings.adapter, "leave it out: this engine has no adapters"
            )
        if self._asleep:
            raise StateError(f"engine {self._name} is asleep: update or wake it first")
        ids = token_ids(prompts, settings, self._tokenizer)
        version = self._gate.enter(self._name)
        try:
            made = self._complete(ids, settings, version) if ids else []
        finally:
            self._gate.leave()
        return with_texts(Rollout.of(made), prompts, settings, self._tokenizer)

    def close(self) -> None:
        """End the calls that wait for a resume, then disconnect from the holder."""
        self._gate.close()
        self._detach()

    def _detach(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = self._writer = None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return self._folder.tokenizer()

    @cached_property
    def _end_tokens(self) -> list[int]:
        return self._folder.end_tokens()

    def _config(self, settings: Sampling, ends: Sequence[int]) -> GenerationConfig:
        from transformers import GenerationConfig

        settings.require_known(GenerationConfig().to_dict().keys(), _REFUSED)
        greedy = settings.temperature == 0
        try:
            return GenerationConfig(
                **{
                    **({} if greedy else {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}),
                    **settings.passed,
                    "max_new_tokens": settings.max_tokens,
                    "do_sample": not greedy,
                    "eos_token_id": list(ends) or None,
                    "pad_token_id": 0,
                }
            )
        except (ValueError, TypeError) as error:
            raise settings.refusal("transformers", error) from error

    @torch.no_grad()
    def _complete(
        self, prompts: Sequence[Sequence[int]], settings: Sampling, version: int
    ) -> list[Completion]:
        ends = [*settings.stop_token_ids, *(() if settings.ignore_eos else self._end_tokens)]
        config = self._config(settings, ends)
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        ids = torch.tensor(rows, device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        watch = BatchWatch(settings, ends, self._tokenizer, lambda: self._gate.cut)
        gpus = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        with torch.random.fork_rng(gpus, enabled=settings.seed is not None):
            if settings.seed is not None:
                torch.manual_seed(settings.seed)
            try:
                with watch.seeing(self.model):
                    self.model.generate(
                        ids, attention_mask=mask, generation_config=config, stopping_criteria=[watch]
                    )
            except (ValueError, TypeError) as error:
                raise settings.refusal("transformers", error) from error
        return watch.completions(version)


class _Gate:
    """Admits one `generate` at a time, and none while shut. Starts shut, without a version."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut, self._busy, self._closed = True, False, False
        self.cut = False
        self._version: int | None = None

    @property
    def quiet(self) -> bool:
        """Return True if no call runs and none is admitted."""
        return self._shut and not self._busy

    @property
    def serving(self) -> int:
        """The version for calls that are admitted now; 0 while none are."""
        return 0 if self._shut or self._version is None else self._version

    def enter(self, name: str) -> int:
        with self._changed:
            if self._version is None:
                raise StateError(f"engine {name} holds no committed version: update it first")
            self._changed.wait_for(
                lambda: self._closed or self._version is None or not (self._shut or self._busy)
            )
            if self._closed:
                raise StateError(f"engine {name} is closed")
            if self._version is None:
                raise StateError(f"engine {name} lost its version in a failed update: heal it first")
            self._busy = True
            return self._version

    def leave(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def shut(self, timeout_s: float, *, cut: bool) -> bool:
        """Shut, and return whether the running call ended in time; if not, undo it.

        `cut`: ask the running call to end early.
        """
        with self._changed:
            before, self._shut, self.cut = self._shut, True, cut
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                self._shut = before
                self._changed.notify_all()
            self.cut = False
            return not self._busy

    def invalidate(self) -> None:
        """Refuse all calls, waiting and new ones, until `open`."""
        with self._changed:
            self._version = None
            self._changed.notify_all()

    def open(self, version: int) -> None:
        with self._changed:
            self._shut, self._version = False, version
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
