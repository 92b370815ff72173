"""What an inference engine has to offer, and what each of its ranks does with the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.plan import Plan, RankLayout
    from weightsync.protocol.handles import Attached
    from weightsync.protocol.messages import Digests, FeedTicket
    from weightsync.protocol.timing import Span

__all__ = ["Completion", "Engine", "Rollout"]


@dataclass(frozen=True, slots=True)
class Completion:
    """New tokens of one prompt, and the versions that made the first and the last of them.

    `aborted`: a pause cut it short.
    """

    tokens: list[int]
    versions: tuple[int, int]
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions of one call.

    Attributes:
        tokens: one list of new token ids per prompt, in the prompts' order.
        versions: per prompt, the versions that served its first and its last token.
        aborted: per prompt, whether a pause cut it short, see ``sync.pause``.
    """

    tokens: list[list[int]]
    versions: list[tuple[int, int]]
    aborted: list[bool]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Rollout:
        """What was completed, in the prompts' order."""
        return cls(
            [each.tokens for each in completions],
            [each.versions for each in completions],
            [each.aborted for each in completions],
        )

    @property
    def version(self) -> int:
        """The oldest version that made a token of this rollout; 0 where there is none."""
        return min((first for first, _ in self.versions), default=0)


class Engine(Protocol):
    """One inference engine, all its ranks, as its actor's process sees it.

    Methods block and are called from worker threads; ``generate`` may run while another is called.
    An engine serves nothing until its first ``resume(version)``.
    """

    def layout(self) -> Sequence[RankLayout]:
        """What each rank needs, in the checkpoint's names; called once, before ``attach``."""

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect rank i to its holder by ``tickets[i]``; returns what each rank says of itself.

        A rank that exports its live memory has it written by its holder while `load` waits.

        Called once per membership epoch. When it returns, every rank has mapped its holder's
        memory and exchanged one message with it. An earlier epoch's connections are closed.
        """

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens. ``keep`` freezes running requests, ``wait`` lets them end first, ``abort``
        ends them with the tokens that they have.

        Once this returns, no rank reads its weights until ``resume``. One that is asleep takes the memory
        of its weights back, so that they can be loaded. Raises DeadlineError.
        """

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then give the device memory of weights and caches back. Without effect while asleep.

        With `level` 1 the weights stay on the host: `pause` brings them back, and ``resume`` serves the same
        version again. With 2 they are dropped, so that a `load` has to come first. Who calls `generate`
        meanwhile is refused; frozen requests wait. Raises DeadlineError, or ConfigError for an engine that
        was not started to sleep.
        """

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """Take one attempt's buckets from the holders; the one long call of an update.

        Returns, per rank, the digest of what that rank holds of each of the plan's tensors (the boxes
        of its `layout`), shape ``[num_tensors]``, uint64, as found in the engine. Raises EngineError
        or DeadlineError; the engine's weights are then undefined until a later ``load`` succeeds.
        """

    def spans(self) -> Sequence[Sequence[Span]]:
        """Per rank, what the last `load` that succeeded took: see `EngineFeed.spans`."""

    def resume(self, version: int) -> None:
        """Serve `version`: drop caches that earlier weights filled, go on with frozen requests.

        One that was asleep takes back what memory is still missing.
        """

    def serving(self) -> int:
        """The version of the last `resume`; 0 before the first, and from `pause` until the next."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Rollout:
        """Complete token-id prompts. `sampling`: max_tokens, temperature (0 is greedy), seed, stop_token_ids.

        Raises StateError while the engine holds no committed version, and while it is asleep.
        """

    def check(self) -> None:
        """Raises RankLostError once the process of a rank ended or is stopped. Never waits."""

    def set_faults(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """Arm each process of this engine with its share of `faults`, see `weightsync.faults.split_by_rank`.

        Raises ConfigError for a rank that it has not.
        """

    def close(self) -> None:
        """End the engine's processes and connections. Safe to call twice."""
