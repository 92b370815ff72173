"""A trainer rank that Ray did not start: it joins the driver, and lets weights be read in `update`."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from inspect import signature
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from torch import distributed

from weightsync.actors.ray.placement import Placement, own_device
from weightsync.actors.servers.door import check_address, check_token
from weightsync.actors.servers.peers import ServedTrainer
from weightsync.actors.servers.process import JoinedProcess
from weightsync.actors.shard import Shard
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, WeightSyncError, nearest
from weightsync.node.messages import JoinRank, NodeOffer
from weightsync.node.node import Node
from weightsync.protocol.messages import PublishReport, PublishTask

_AT_ONCE = frozenset({"digests", "replica_digests", "set_faults", "start_holder", "end_holder"})
"""Calls that are answered at any time. All others need the weights, and wait for `update`."""

_Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]
_Calls: TypeAlias = "SimpleQueue[_Call | int | WeightSyncError]"
"""A driver's calls, and how updates ended: with the version, or the error."""


class JoinedTrainer(JoinedProcess, TrainerShard):
    """A rank of a trainer that Ray did not start, as `join` returns it.

    As in an actor derived from `TrainerShard`, you may set ``draft``, ``hf_config`` or ``source``, and
    replace ``model``.
    """

    def __init__(self, model: Any, rank: int, world_size: int, **options: Any) -> None:  # noqa: ANN401
        """`options`: arguments of `TrainerShard`."""
        JoinedProcess.__init__(self)
        TrainerShard.__init__(self, **options)
        self.model = model
        self._as_rank, self._run = JoinRank(rank, world_size, self._process), _run()
        self._calls: _Calls = SimpleQueue()
        self._takes_part = False

    def update(self, timeout_s: float = 1800.0) -> int:
        """Let the driver's next `update_weights`, or `update_adapter`, move the weights. Returns the version.

        Call it in all ranks. It returns once engines serve the weights. Weights are only read within it: they
        have to be final when it begins, and may change once it has ended.

        Args:
            timeout_s: seconds to wait for each call of the driver.

        Raises:
            DeadlineError: the driver did not call in time.
            PeerLostError: the driver has ended, or cannot be reached any more.
            WeightSyncError: the update failed; the error is the driver's. Also for a rank that came too late
                for an update: each `update` of each rank belongs to one `update_weights`.
        """
        calls, self._takes_part = self._calls, False
        try:
            while True:
                called = calls.get(timeout=timeout_s)
                if isinstance(called, int):
                    return called
                if isinstance(called, WeightSyncError):
                    raise called
                _answer(*called)
        except (Empty, KeyboardInterrupt) as error:
            if self._takes_part and self._node:  # a late end must not end another `update`
                self._node.stop()
            if isinstance(error, KeyboardInterrupt):
                raise
            trouble = f" ({self._trouble})" if self._trouble else ""
            raise DeadlineError("update()", [f"the driver at {self._driver}{trouble}"], timeout_s) from None

    def _here(self, slot: str | None) -> Placement:
        return replace(self._placed(own_device(slot)), run=self._run)

    @property
    def _title(self) -> str:
        return f"trainer {self._as_rank.rank}"

    def _greeting(self) -> JoinRank:
        return self._as_rank

    def _new_node(self, offer: NodeOffer) -> Node:
        self._node = Node(offer, _Methods(self, self._calls), ServedTrainer, None, self._process)
        return self._node

    def _left(self, why: str) -> None:
        calls, self._calls = self._calls, SimpleQueue()
        calls.put(PeerLostError(f"the driver at {self._driver}", why))


class _Methods:
    """The methods of `ServedTrainer`. Those that need the weights run in `JoinedTrainer.update`.

    Those of a part are of an adapter.
    """

    def __init__(self, trainer: JoinedTrainer, calls: _Calls, adapter: str = "") -> None:
        self._trainer, self._calls, self._adapter = trainer, calls, adapter

    def part(self, name: str) -> _Methods:
        return _Methods(self._trainer, self._calls, name)

    @property
    def _shard(self) -> Shard:
        return self._trainer.sync_part(self._adapter) if self._adapter else self._trainer

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._shard, f"sync_{method}")
        return call if method in _AT_ONCE else partial(self._in_update, call)

    async def _in_update(self, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - its answer
        answer: Future[Any] = Future()
        self._calls.put((answer, partial(call, *args)))
        return await asyncio.wrap_future(answer)  # which is cancelled if the driver waits no more

    def ping(self) -> None:
        """Answer at any time."""

    async def begin(self) -> None:
        await self._in_update(setattr, self._trainer, "_takes_part", True)

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        shard = self._shard

        def tell() -> None:
            if shard._ready():
                readable.set_result(None)

        report: PublishReport = await self._in_update(shard._publish, task, tell)
        return report

    def end(self, version: int, error: WeightSyncError | None) -> None:
        self._calls.put(version if error is None else error)


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # the driver waits for it no more
    try:
        answer.set_result(call())
    except Exception as error:  # noqa: BLE001 - the driver gets it
        answer.set_exception(error)


def join(model: Any = None, **options: Any) -> JoinedTrainer:  # noqa: ANN401
    """Join a driver as a rank of a trainer that Ray did not start, such as a script of ``torchrun``::

        shard = weightsync.join(model)
        for batch in batches:
            step(model, batch)
            shard.update()

    The driver's address is in ``WEIGHTSYNC_JOIN``, see docs/servers.md. The rank and the world size come from
    `torch.distributed`, or from ``RANK`` and ``WORLD_SIZE``. Returns before the driver is reached.

    Args:
        model: this rank's, as ``self.model`` of `TrainerShard`.
        options: arguments of `TrainerShard`, such as ``exclude``.

    Raises:
        ConfigError: the environment or an option is wrong.
    """
    check_address()
    check_token()
    known = signature(TrainerShard).parameters
    if unknown := options.keys() - known:
        raise ConfigError("options", min(unknown), nearest(min(unknown), known))
    trainer = JoinedTrainer(model, *_rank(), **options)
    trainer.join()
    return trainer


def _rank() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError("RANK", rank, f"WORLD_SIZE is {world_size}: give 0 to {world_size - 1}")
    return rank, world_size


def _run() -> str:
    """Return a text that the ranks of this run of the script share, "" without `torch.distributed`."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    assert distributed.group.WORLD
    store = distributed.group.WORLD.get_group_store()  # None with MPI
    return str(store.compare_set("weightsync run", "", secrets.token_hex(8)).decode()) if store else ""


def _number(variable: str, default: int) -> int:
    given = os.environ.get(variable, str(default))
    if not given.isdecimal():
        raise ConfigError(variable, given, "give a whole number, as torchrun does")
    return int(given)
