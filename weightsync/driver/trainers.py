"""Asks all trainer ranks for a version, and adds up their answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import Outcome, gather_named
from weightsync.errors import MovedError, NonfiniteError
from weightsync.protocol.messages import Digests, Fingerprint, PublishReport, combine
from weightsync.protocol.peers import TrainerPeer
from weightsync.protocol.timing import Span

logger = logging.getLogger("weightsync.driver.trainers")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One version, as its trainers published it.

    Attributes:
        answers: each trainer's answer by its name, in rank order.
        fingerprint: that of the tensors' digests, added up over ranks.
        frozen: the same of frozen tensors alone.
        nonfinite: elements that are NaN or Inf, by tensor.
    """

    answers: Mapping[str, PublishReport]
    fingerprint: Fingerprint
    frozen: Fingerprint
    nonfinite: Mapping[str, int]

    @property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """What each trainer rank took its time for, by its name."""
        return {name: each.spans for name, each in self.answers.items() if each.spans}


class Trainers:
    """The fleet's trainer ranks, asked in parallel."""

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet

    async def publish(self, version: int) -> Publication:
        """Have all ranks publish `version`.

        Raises DeadlineError, NonfiniteError where ``nonfinite`` is refuse, or a rank's error: MovedError only
        if there is no other.
        """
        count = self._config.nonfinite != "ignore"
        answers = await self._ask(lambda trainer: trainer.publish(count))
        nonfinite = self._counted(version, answers) if count else {}
        reports = answers.values()
        return Publication(
            answers,
            combine([each.fingerprint for each in reports]),
            combine([each.frozen for each in reports]),
            nonfinite,
        )

    async def digests(self) -> Mapping[str, Digests]:
        """Return the tables that ranks published last, by name. Ranks that do not answer are left out."""
        outcome = await gather_named(
            self._named(lambda trainer: trainer.digests()), "verify", self._config.timeout_s
        )
        for name, error in outcome.failures.items():
            logger.warning("[%s] its digests are not known: %s", name, error)
        return outcome.answers

    async def ready(self) -> bool:
        """Have all ranks finish writing. Returns whether all are read in place. Raises as `publish`."""
        return all((await self._ask(lambda trainer: trainer.ready())).values())

    async def _ask(self, call: Callable[[TrainerPeer], Coroutine[object, object, T]]) -> Mapping[str, T]:
        outcome = await gather_named(self._named(call), "publish", self._config.timeout_s)
        others = {name: e for name, e in outcome.failures.items() if not isinstance(e, MovedError)}
        return Outcome(outcome.answers, others or outcome.failures).require()

    def _named(
        self, call: Callable[[TrainerPeer], Coroutine[object, object, T]]
    ) -> dict[str, Coroutine[object, object, T]]:
        return {f"trainer {i}": call(trainer) for i, (trainer, _) in enumerate(self._fleet.trainers)}

    def _counted(self, version: int, answers: Mapping[str, PublishReport]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for each in answers.values():
            counts.update(each.nonfinite)
        if counts:
            error = NonfiniteError(version, sorted(counts.items()))
            if self._config.nonfinite == "refuse":
                raise error
            logger.warning("[driver] %s", error)
        return dict(counts)
