"""The seam between the driver and an inference engine, and the values of `Generates.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from weightsync.config import Components, PrefixCache
from weightsync.engines.rank.rank_host import RankHost
from weightsync.faults import Fault
from weightsync.plan import Plan, RankLayout
from weightsync.plan.layout.arrangement import Experts
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

Prompts = Sequence[Sequence[int] | str]
"""Token ids, or a text if the engine has a tokenizer."""
Segments = list[tuple[int, int]]
"""Pairs of a version and how many tokens in a row it made. Never empty: no tokens are ``[(version, 0)]``."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt. `Rollout` describes the fields."""

    tokens: list[int]
    segments: Segments
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions of one call: `n` in a row for the first prompt, then `n` for the second, and so on.

    Log-probabilities are the model's own: the log-softmax of the logits in float32, before temperature,
    `top_p` and the like. At temperature 1, without `top_p` and the like, they are the distribution that was
    sampled from. A token and its log-probability come from the same version.

    Attributes:
        tokens: one list of new token ids per completion.
        segments: per completion, the versions that made the tokens: pairs of a version and a number of
            tokens. There is more than one pair if updates came in between, see ``sync.pause``.
        logprobs: per completion, the log-probability of every token, unless they were left out.
        finish_reasons: per completion, ``stop``, ``length`` or ``abort``, which is a pause that cut it short.
            An engine may have more words, for settings of its own.
        adapter, adapter_version: the adapter that answered, and its version; empty and 0 without an adapter.
        texts: the completions as texts, without stop strings and special tokens, if prompts were texts.
    """

    tokens: list[list[int]]
    segments: list[Segments]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    adapter: str = ""
    adapter_version: int = 0
    texts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, completions: Sequence[Completion], adapter: str = "", adapter_version: int = 0) -> Rollout:
        """Make a rollout from completions in the prompts' order."""
        return cls(
            [each.tokens for each in completions],
            [each.segments for each in completions],
            [each.logprobs for each in completions],
            [each.finish_reason for each in completions],
            adapter,
            adapter_version,
        )

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Per completion, the versions that made the first and the last token."""
        return [(each[0][0], each[-1][0]) for each in self.segments]

    @property
    def aborted(self) -> list[bool]:
        """Per completion, whether a pause cut it short."""
        return [reason == "abort" for reason in self.finish_reasons]

    @property
    def version(self) -> int:
        """The oldest version that made a token of this rollout; 0 if it is empty."""
        return min((first for first, _ in self.versions), default=0)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Tokens that were drafted since an engine started.

    Attributes:
        num_drafted: how many were proposed.
        num_accepted: how many of these the engine's model accepted.
    """

    num_drafted: int = 0
    num_accepted: int = 0

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return the counts since `earlier`."""
        return DraftCounts(self.num_drafted - earlier.num_drafted, self.num_accepted - earlier.num_accepted)

    @property
    def acceptance(self) -> float | None:
        """The share of the drafted tokens that was accepted, 0 to 1. None if none was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class Engine(Protocol):
    """One inference engine with all ranks, in the process of the engine's actor or server.

    The driver calls most methods through this process. Methods block and are called from worker threads. An
    engine serves nothing until the first ``resume(version)``. Abilities of only some engines have their own
    protocols: `Generates`, `ExportsMemory`, `ExportsAhead`, `Sleeps`, `HasRankProcesses`.
    """

    def layout(self) -> Sequence[RankLayout | LayoutTable]:
        """Return the layout of each rank, in the checkpoint's names. Called before ``attach``.

        Ranks in processes of their own answer faster with a `LayoutTable`: pickling it makes no object for
        each tensor.
        """

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect rank i to its holder by ``tickets[i]``. Returns each rank's plan digest and export.

        Called once per membership epoch. When it returns, every rank has mapped the memory of its holder and
        exchanged one message with the holder. Connections of an earlier epoch are closed. If a rank exports
        its live memory, the holder writes this memory while `load` waits.
        """

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens.

        Mode ``keep`` freezes running requests, ``wait`` lets them end first, ``abort`` ends them with their
        tokens so far. Once this returns, no rank reads weights until ``resume``. An engine that is asleep
        allocates memory for the weights, so that they can be loaded. Raises DeadlineError.
        """

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Take one attempt's buckets from the holders, while they move.

        Returns each rank's digests of the tensors that are in the engine afterwards. Raises EngineError or
        DeadlineError; the engine's weights are then undefined until a later ``load`` succeeds.
        """

    def resume(self, version: int) -> None:
        """Serve `version`: drop caches of earlier weights (see `CachesPrefixes`), continue frozen requests.

        An engine that was asleep allocates the memory that is still missing.
        """

    def serving(self) -> int:
        """Return the version being served; 0 before the first `resume`, and while paused."""

    def close(self) -> None:
        """End the engine's processes and connections. Safe to call twice."""


class Generates(Engine, Protocol):
    """An engine that `EngineActor` asks for tokens."""

    def generate(self, prompts: Prompts, sampling: Mapping[str, Any]) -> Rollout:
        """Complete prompts. May run at the same time as another method.

        `sampling` has the fields of `Sampling`, and settings that only this engine knows. Raises ConfigError
        for a setting that nobody knows, StateError while the engine holds no committed version, and while it
        is asleep.
        """


@runtime_checkable
class ExportsMemory(Protocol):
    """An engine that knows before ``attach`` whether its ranks will export their live memory.

    Other engines may export memory too, but the plan then has buckets.
    """

    def can_export(self) -> Sequence[bool]:
        """Return for each rank whether ``attach`` would export live memory now.

        The driver calls it in each connect, after ``layout``, if every layout has a device and buffers and
        the trainers' memory can be read.
        """


@runtime_checkable
class ExportsAhead(Protocol):
    """An engine that knows its exports ahead, so that holders map them while the engine attaches."""

    def export(self) -> Sequence[DeviceMemory | None]:
        """Return for each rank the memory that ``attach`` would export now.

        It is called after ``layout`` when the engine joins a fleet. If ``attach`` then exports other memory,
        holders map that.
        """


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can release device memory between updates."""

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the device memory of weights and caches. No effect while asleep.

        With `level` 1 the weights stay on the host: ``pause`` brings them back, and ``resume`` serves the
        same version again. With 2 they are dropped, so a ``load`` must follow. Tokens are refused while
        asleep; frozen requests wait. Raises DeadlineError, or ConfigError if the engine was not started to
        sleep.
        """


@runtime_checkable
class MovesExperts(Protocol):
    """An engine that may move experts between slots. The layouts' `arrangement` says where experts are."""

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks now, by layer. Empty if experts stay."""

    def move_experts(self, experts: Experts) -> None:
        """Rearrange the live experts of a paused engine. ``layout`` and ``attach`` follow.

        After an error the engine's weights are undefined until a `load` succeeds.
        """

    def live_digests(self) -> Sequence[Loaded]:
        """Return each rank's digests of the tensors in the engine, as ``load`` does, without a load."""


@runtime_checkable
class ServesAdapters(Protocol):
    """An engine with slots for LoRA adapters, which are updated apart from the weights."""

    def open_adapter(self, spec: AdapterSpec) -> Engine:
        """Return an `Engine` that updates an adapter, in slots that it takes.

        An adapter of that name is closed first. Raises ConfigError if there are not enough slots.
        """

    def close_adapter(self, name: str) -> None:
        """Give an adapter's slots back, once no request uses them. Raises DeadlineError if some do."""


@runtime_checkable
class HasComponents(Protocol):
    """An engine that may serve more than a model, such as a draft."""

    def use_components(self, components: Components) -> None:
        """Treat the engine's components as `SyncConfig.components` says, from the next ``layout`` on.

        Called in each connect, before ``layout``, if the components changed.
        """


@runtime_checkable
class CountsDrafts(Protocol):
    """An engine that can count the drafted tokens that the model accepted."""

    def draft_counts(self) -> DraftCounts | None:
        """Return the counts since the engine started. None if it does not speculate, or does not count."""


@runtime_checkable
class CachesPrefixes(Protocol):
    """An engine that caches computed prompts for other requests, and may separate the caches by version."""

    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        """Treat cached prefixes as `SyncConfig.prefix_cache` says, at each `resume` with other weights.

        Called in each connect, after ``attach``. Raises ConfigError if the engine cannot do that.
        """


@runtime_checkable
class HasRankHosts(Protocol):
    """An engine whose ranks may be on other hosts than its process, as with vLLM's executor ``ray``."""

    def hosts(self) -> Sequence[RankHost]:
        """Return the host of each rank. Called with ``layout``."""


@runtime_checkable
class HasRankProcesses(Protocol):
    """An engine that can run ranks in separate processes."""

    def check(self) -> None:
        """Raise RankLostError once the process of a rank ended or is stopped. Never waits."""

    def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set each process's part of `faults`, see `weightsync.faults.split_by_rank`.

        Raises ConfigError for a rank that the engine does not have.
        """
