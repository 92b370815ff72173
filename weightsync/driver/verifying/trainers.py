"""Asks all trainer ranks for a version, adds up the answers, and finds ranks that wrote during an update."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.agreement import Agreement
from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_group import Rewritten
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, Outcome, gather_named
from weightsync.errors import MovedError, NonfiniteError, SourceChangedError, WeightSyncError
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.protocol.messages import Digests, Fingerprint, PublishReport, PublishTask, Sample, combine
from weightsync.protocol.peers import RelayPeer
from weightsync.protocol.timing import Span

logger = logging.getLogger("weightsync.driver")

_EARLY_S = 0.005
"""Time for trainers to answer by sockets. Calls through Ray take about two milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One version, as the trainers published it.

    Attributes:
        answers: each trainer's answer by its name, in rank order.
        fingerprint: the fingerprint of the tensors' digests, added up over ranks.
        frozen: the same fingerprint, of frozen tensors only.
        nonfinite: elements that are NaN or Inf, by tensor.
    """

    answers: Mapping[str, PublishReport]
    fingerprint: Fingerprint
    frozen: Fingerprint
    nonfinite: Mapping[str, int]

    @property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """Time spans per trainer rank."""
        return {name: each.spans for name, each in self.answers.items() if each.spans}

    @property
    def samples(self) -> Sequence[Mapping[str, Sample]]:
        """The ranks' samples of the changes since the version before, if ranks were asked for samples."""
        return [each.changed for each in self.answers.values() if each.changed]


class Publishing:
    """A version that trainers publish. Holders may read trainers' memory before the digests are known.

    The driver asks trainers by sockets whether holders may read, then calls `publish`: trainers take digests
    while engines pause and bytes move.
    """

    def __init__(
        self,
        publish: Callable[[], Coroutine[object, object, Publication]],
        readable: Sequence[asyncio.Future[None]],
        ask: Callable[[], Collection[asyncio.Future[bool]]],
    ) -> None:
        """`publish` has a deadline of its own; `readable` has one future for each rank."""
        self._publish, self._ask, self._readable = publish, ask, readable
        self._publication: asyncio.Task[Publication] | None = None

    async def readable(self) -> None:
        """Wait until holders may read all ranks in place, or all ranks have published.

        Raises the error of `publication`, if it has failed by then.
        """
        if asked := self._ask():
            await asyncio.wait(asked, timeout=_EARLY_S)
        publication = self.publication()
        for each in self._readable:  # most are readable by the time that the first is
            if not each.done() and not publication.done():
                either: list[asyncio.Future[Any]] = [each, publication]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if publication.done():
            publication.result()

    def publication(self) -> asyncio.Task[Publication]:
        """Call all ranks, unless they were called, and return the task. It raises as `Trainers.publish`."""
        if self._publication is None:
            self._publication = asyncio.create_task(self._publish())
        return self._publication

    def close(self) -> None:
        """Stop waiting. Ranks that still publish finish."""
        begun = self._publication
        if begun and not begun.cancel() and not begun.cancelled():
            begun.exception()  # else asyncio logs that nobody asked


class Trainers:
    """The fleet's trainer ranks, asked in parallel.

    Attributes:
        agreement: compares the boxes that several ranks hold; None if the plan has no such boxes.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self.agreement: Agreement | None = None

    @property
    def compares_all(self) -> bool:
        """Return True if the next `publish` compares all boxes, and there are some."""
        return self.agreement is not None and self.agreement.compares_all

    def begin(self, version: int) -> Publishing:
        """Have all ranks publish `version`, once somebody waits for the result."""
        readable = [asyncio.get_running_loop().create_future() for _ in self._fleet.trainers]
        return Publishing(partial(self._publish, version, readable), readable, partial(self._look, readable))

    async def publish(self, version: int) -> Publication:
        """Have all ranks publish `version`, and compare all boxes that several ranks hold.

        Raises DeadlineError, NonfiniteError where ``nonfinite`` is refuse, SourceChangedError,
        ReplicasDifferError, or a rank's error: MovedError only if there is no other.
        """
        if self.agreement:
            self.agreement.compare_all()
        return await self.begin(version).publication()

    def _look(self, readable: Sequence[asyncio.Future[None]]) -> Collection[asyncio.Future[bool]]:
        """Ask ranks whether holders may read already. Returns nothing if some ranks cannot be asked."""
        if self._fleet.relays:
            return ()
        pairs = zip(self._fleet.trainers, readable, strict=True)
        asked = [trainer.ask_readable(each) for (trainer, _), each in pairs]
        known = [each for each in asked if each is not None]
        return known if len(known) == len(asked) else ()

    async def _publish(self, version: int, readable: Sequence[asyncio.Future[None]]) -> Publication:
        agreement, count = self.agreement, self._config.nonfinite != "ignore"
        rounds = agreement.rounds if agreement else ()
        outcome = await self._ask(PublishTask(count, rounds, self._config.density), readable)
        others = {name: e for name, e in outcome.failures.items() if not isinstance(e, MovedError)}
        answers = Outcome(outcome.answers, others or outcome.failures).require()
        if written := [(name, each.written) for name, each in answers.items() if each.written]:
            raise SourceChangedError(version, written)
        nonfinite = self._counted(version, answers) if count else {}
        if agreement:
            await agreement.require(version, answers, rounds)
        reports = answers.values()
        return Publication(
            answers,
            combine([each.fingerprint for each in reports]),
            combine([each.frozen for each in reports]),
            nonfinite,
        )

    async def _ask(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]]
    ) -> Outcome[PublishReport]:
        """Have ranks publish, through relays if there are any. Returns the answers in rank order."""
        if not self._fleet.relays:
            return await self._ask_directly(range(len(readable)), task, readable)
        relayed = {rank for relay in self._fleet.relays for rank in relay.ranks}
        others = [rank for rank in range(len(readable)) if rank not in relayed]
        outcomes = await asyncio.gather(
            self._ask_directly(others, task, readable),
            *(self._ask_through(relay, task, readable) for relay in self._fleet.relays),
        )
        answers = {name: report for each in outcomes for name, report in each.answers.items()}
        failures = {name: error for each in outcomes for name, error in each.failures.items()}
        names = [f"trainer {rank}" for rank in range(len(readable))]
        return Outcome({name: answers[name] for name in names if name in answers}, failures)

    async def _ask_directly(
        self, ranks: Sequence[int], task: PublishTask, readable: Sequence[asyncio.Future[None]]
    ) -> Outcome[PublishReport]:
        calls = {f"trainer {i}": self._fleet.trainers[i][0].publish(task, readable[i]) for i in ranks}
        return await gather_named(calls, "publish", self._config.timeout_s)

    async def _ask_through(
        self, relay: RelayPeer, task: PublishTask, readable: Sequence[asyncio.Future[None]]
    ) -> Outcome[PublishReport]:
        timeout_s = self._config.timeout_s
        call = relay.publish(task, [readable[rank] for rank in relay.ranks], timeout_s)
        relayed = await gather_named({relay.name: call}, "publish", timeout_s + GRACE_S)
        for error in relayed.failures.values():
            logger.warning("[driver] asks trainers itself: %s", error)
            # Publishing twice does no harm. Weights do not change in an update, so a trainer copies the same
            # bytes to the same places and digests them again, after earlier calls.
            return await self._ask_directly(relay.ranks, task, readable)
        outcome: Outcome[PublishReport] = Outcome({}, {})
        for rank, said in zip(relay.ranks, relayed.answers[relay.name], strict=True):
            if isinstance(said, WeightSyncError):
                outcome.failures[f"trainer {rank}"] = said
            else:
                outcome.answers[f"trainer {rank}"] = said
        return outcome

    async def digests(self) -> Mapping[str, Digests]:
        """Return the tables that ranks published last, by name. Ranks that do not answer are left out."""
        calls = {f"trainer {i}": trainer.digests() for i, (trainer, _) in enumerate(self._fleet.trainers)}
        outcome = await gather_named(calls, "verify", self._config.timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[%s] its digests are not known: %s", name, error)
        return outcome.answers

    def _counted(self, version: int, answers: Mapping[str, PublishReport]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for each in answers.values():
            if each.nonfinite:
                counts.update(each.nonfinite)
        if counts:
            error = NonfiniteError(version, sorted(counts.items()))
            if self._config.nonfinite == "refuse":
                raise error
            logger.warning("[driver] %s", error)
        return dict(counts)


async def rewritten(
    fleet: Fleet,
    connection: Connection,
    published: Mapping[str, Fingerprint],
    tables: Mapping[str, Digests],
    suspects: frozenset[str],
    timeout_s: float,
) -> Rewritten:
    """Compare the digests of trainers' memory, taken by holders now, with the published digests.

    Holders are asked, since a trainer that writes may be busy for long. A holder that does not answer within
    `timeout_s` seconds is skipped.

    Args:
        published: the trainers' fingerprints by name, in the order of ``fleet.trainers``.
        tables: the digests behind it. A trainer may be too busy to give them.
        suspects: tensors to report if the fingerprint of a trainer without a table differs.
    """
    calls = {
        name: fleet.holders[holder].digests()
        for name, (_, holder) in zip(published, fleet.trainers, strict=True)
    }
    outcome = await gather_named(calls, "verify", timeout_s)
    for name, error in outcome.failures.items():
        logger.warning("[%s] it is not known whether it wrote what was read: %s", name, error)
    found = outcome.answers
    if connection.checkpoint:  # one process per host publishes for all ranks of the host
        tables = {"another process": combine([*tables.values()])} if len(tables) == len(published) else {}
        published = {"another process": combine([*published.values()])}
        found = {"another process": combine([*found.values()])} if not outcome.failures else {}
    names = np.array([meta.name for meta in connection.plan.tensors])
    return {
        name: frozenset(names[digests != tables[name]].tolist()) if name in tables else suspects
        for name, digests in found.items()
        if (fingerprint(digests) != published[name]).any()
    }
