"""vLLM's side of an update: what runs in each process that holds a rank's parameters."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.buffers import Attached
from weightsync.engines.ranks import RankProcess
from weightsync.engines.vllm_api import ModelRunner, Reload, stored_otherwise
from weightsync.engines.vllm_experts import as_loaded
from weightsync.engines.vllm_segments import UnprovableError
from weightsync.engines.vllm_trace import trace
from weightsync.errors import DeadlineError, EngineError, StateError, WeightSyncError
from weightsync.faults import Fault, arm
from weightsync.feed import EngineFeed, PieceView
from weightsync.live import LiveWriter
from weightsync.missing import Missing
from weightsync.modules import device_id, named_tensors
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.verify import tensor_digest

if TYPE_CHECKING:
    from weightsync.clock import Span
    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan
    from weightsync.verify import Digests

__all__ = ["WeightSyncWorker"]

logger = logging.getLogger("weightsync.engines.vllm")

_BATCH_NBYTES = 64 << 20


class WeightSyncWorker:
    """Mixed into vLLM's worker class, so it may hold no name that the worker has."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: ModelRunner
        _ws_rank: _Rank

    def ws_call(self, blob: bytes) -> bytes:
        """Call a method of this worker's `_Rank`; answers with its result or its error."""
        method, args = pickle.loads(blob)
        try:
            if not hasattr(self, "_ws_rank"):
                self._ws_rank = _Rank(self.rank, self.device, self.model_runner)
            outcome = getattr(self._ws_rank, method)(*args)
        except WeightSyncError as error:
            outcome = error
        except Exception as error:
            # An answer in any case: vLLM reads the ranks' answers in turn, and would give what is left
            # of these to the next call.
            logger.exception("rank %d: %s failed", self.rank, method)
            named = self._ws_rank.engine if hasattr(self, "_ws_rank") else ""
            outcome = EngineError(named, method, f"{type(error).__name__}: {error}", self.rank)
        return pickle.dumps(outcome)


class _Rank:
    """One rank's side, in the process that owns its parameters."""

    def __init__(self, rank: int, device: torch.device, runner: ModelRunner) -> None:
        self._rank, self._device, self._runner = rank, device, runner
        self._layout: RankLayout | None = None
        self._live: dict[str, torch.Tensor] = {}
        self._feed: EngineFeed | None = None
        self._plan: Plan | None = None
        self._writer: LiveWriter | None = None
        self.engine = ""

    def join(self, engine_pid: int) -> RankProcess | None:
        """See `RankProcess.join`."""
        return RankProcess.join(self._rank, engine_pid)

    def arm(self, who: str, faults: Sequence[Sequence[Fault]], seed: int) -> None:
        """Take this rank's share of what strikes in the ranks' processes."""
        if faults[self._rank] or not any(faults):
            arm(who, faults[self._rank], seed)

    def layout(self) -> RankLayout:
        """Where the loader puts what, if that can be proven; otherwise whole tensors, without live buffers.

        Found out once: live parameters keep their addresses.
        """
        if self._layout is None:
            self._layout = self._find_layout()
        return self._layout

    def _current(self) -> dict[str, torch.Tensor]:
        """What the model has now under the names of the live buffers."""
        model = self._runner.get_model()
        return {**dict(model.named_buffers()), **dict(model.named_parameters())}

    def addresses(self) -> dict[str, int]:
        """Where each live parameter lies: these stay, since CUDA graphs hold them."""
        return {name: each.data_ptr() for name, each in self._runner.get_model().named_parameters()}

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Attached:
        self.close()
        layout, ticket = self.layout(), tickets[self._rank]
        self._feed, self._plan, self.engine = EngineFeed.open(ticket, plan, timeout_s), plan, ticket.engine
        if not layout.buffers:
            return Attached(plan.digest(), None)
        self._writer = LiveWriter(plan, layout, self._live, self._feed.slots)
        return Attached(plan.digest(), self._writer.export())

    def settle(self) -> None:
        """Wait for a step that may still run with the old weights."""
        _synchronize(self._device)

    def load(self, attempt: int, timeout_s: float) -> tuple[Digests, Sequence[Span]]:
        if self._feed is None or self._plan is None:
            raise StateError("a rank is not attached: connect first")
        try:
            if self._writer:
                self._writer.begin(self._current())
                digests = self._feed.receive(attempt, self._writer, timeout_s)
            else:
                digests = self._reload(self._feed, self._plan, attempt, timeout_s)
            return digests, self._feed.spans
        except WeightSyncError as error:
            if isinstance(error, DeadlineError | EngineError):
                raise
            raise EngineError(self.engine, "load", str(error), self._rank) from error

    def close(self) -> None:
        self._writer = None
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def reload(self) -> RankLayout:
        """Take whole tensors from now on, whatever could be proven."""
        metas, tied = _checkpoint(self._runner)
        self._layout = _whole_layout(metas, tied, device_id(self._device))
        return self._layout

    def _find_layout(self) -> RankLayout:
        metas, tied = _checkpoint(self._runner)
        device = device_id(self._device)
        if reason := stored_otherwise(self._runner, self._device):
            level = logging.INFO if self._device.type == "cpu" else logging.WARNING
            logger.log(level, "rank %d reloads through vLLM: %s", self._rank, reason)
        else:
            try:
                traced = trace(self._runner.get_model(), metas, tied, device)
            except UnprovableError as error:
                logger.warning("rank %d reloads through vLLM: %s", self._rank, error)
            else:
                self._live = traced.live
                return traced.layout
        return _whole_layout(metas, tied, device)

    def _reload(self, feed: EngineFeed, plan: Plan, attempt: int, timeout_s: float) -> Digests:
        reload = Reload(self._runner.get_model(), self._runner.model_config, self._device)
        sink = _ReloadSink(plan, reload, self._device)
        try:
            return feed.receive(attempt, sink, timeout_s)
        except WeightSyncError:
            sink.abandon()
            raise


class _ReloadSink:
    """Puts pieces together and hands whole tensors to vLLM's loader, in a layerwise reload."""

    def __init__(self, plan: Plan, reload: Reload, device: torch.device) -> None:
        self._plan, self._reload, self._device = plan, reload, device
        self._shapes = {meta.name: meta.shape for meta in plan.tensors}
        self._missing = Missing(plan)
        self._parts: dict[int, torch.Tensor] = {}
        self._batch: list[tuple[str, torch.Tensor]] = []
        self._batch_nbytes = 0
        self._digests = np.zeros(len(plan.tensors), dtype=np.uint64)

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        for tensor, box, data in pieces:
            self._put(tensor, box, data)
        _synchronize(self._device)

    def finish(self) -> Digests:
        self._missing.require_none()
        self._hand_over()
        self._reload.finish()
        _synchronize(self._device)
        return self._digests

    def written(self) -> None:
        raise AssertionError("a holder wrote into a rank that exported nothing")

    def abandon(self) -> None:
        self._reload.abandon()

    def _put(self, tensor: int, box: Box, data: torch.Tensor) -> None:
        shape = self._plan.tensors[tensor].shape
        if tensor not in self._parts:
            # Memory of its own: the loader keeps tensors until a module is complete.
            self._parts[tensor] = torch.empty(shape, dtype=data.dtype, device=self._device)
        self._parts[tensor][box.slices()].copy_(data)
        if self._missing.take(tensor, box):
            self._add(tensor, self._parts.pop(tensor))

    def _add(self, tensor: int, data: torch.Tensor) -> None:
        meta = self._plan.tensors[tensor]
        self._digests[tensor] = tensor_digest(data, meta.shape)
        self._batch.extend(as_loaded(meta.name, data, self._shapes))
        self._batch_nbytes += meta.nbytes
        if self._batch_nbytes >= _BATCH_NBYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        self._reload.load(self._batch)
        self._batch, self._batch_nbytes = [], 0


def _checkpoint(runner: ModelRunner) -> tuple[tuple[TensorMeta, ...], tuple[tuple[str, str], ...]]:
    """Names, dtypes and shapes of transformers' model of the same config, and its ties."""
    from transformers import AutoModelForCausalLM

    config = runner.model_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.hf_config, dtype=config.dtype)
    tensors, tied = named_tensors(model)
    metas = tuple(
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    return metas, tied


def _whole_layout(
    metas: tuple[TensorMeta, ...], tied: tuple[tuple[str, str], ...], device: str
) -> RankLayout:
    return RankLayout(metas, tuple(map(_whole, metas)), tied, device=device)


def _whole(meta: TensorMeta) -> Segment:
    strides = tuple(stride * meta.itemsize for stride in torch.empty(meta.shape, device="meta").stride())
    return Segment(meta.name, Box((0,) * len(meta.shape), meta.shape), meta.name, 0, strides)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
