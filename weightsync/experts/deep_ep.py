"""DeepEP V1's `Buffer`, for calls of normal mode: change the import.

    from weightsync.experts.deep_ep import Buffer, Config, EventHandle, EventOverlap

As with DeepEP, a token arrives once per rank, by source rank and token, not by expert, and `combine` applies
no weights. All calls are synchronous: events are over, and settings of kernels have no effect.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError
from weightsync.experts.movers import MessageMover, Mover

Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Rows, or FP8 rows with scales."""


class EventHandle:
    """An event of DeepEP, without effect."""


class EventOverlap:
    """An event that is over."""

    def __init__(self, event: object = None, extra_tensors: object = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Return at once."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        """Return at once."""


class Config:
    """Settings of DeepEP's kernels, without effect."""

    def __init__(self, *_: int) -> None: ...

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: memory grows on use."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class DispatchHandle(tuple[torch.Tensor, ...]):
    """DeepEP's six tensors. There is one channel.

    Attributes:
        max_tokens: the most tokens of a rank.
        places: source rank and token of each received row.
    """

    max_tokens: int
    places: tuple[torch.Tensor, ...]


class Buffer:
    """One rank's end. Moves tokens by the group's all-to-all, or by the given mover."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup | Mover,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        *_: object,
        **__: object,
    ) -> None:
        """Other settings of DeepEP have no effect. `low_latency_mode` is refused."""
        if low_latency_mode:
            raise ConfigError("low_latency_mode", True, "give False: only normal mode is here")
        self._mover = group if isinstance(group, Mover) else MessageMover(group)
        self.rank, self.group_size = self._mover.rank, self._mover.num_ranks

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set a number that has no effect."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event that is over."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return settings without effect."""
        return Config()

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        """Do nothing: the group or the mover is the caller's."""

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Return tokens per rank, None, tokens per expert, and which rank needs which token: bool[T, R]."""
        if num_experts % self.group_size:
            raise ConfigError(
                "num_experts", num_experts, f"give a multiple of the number of ranks, {self.group_size}"
            )
        owner = topk_idx.div(num_experts // self.group_size, rounding_mode="floor")  # -1 stays -1
        needed = (owner[..., None] == torch.arange(self.group_size, device=owner.device)).any(1)
        chosen = topk_idx[..., None] == torch.arange(num_experts, device=topk_idx.device)
        return needed.sum(0).int(), None, chosen.sum((0, 1)).int(), needed, EventOverlap()

    def dispatch(
        self,
        x: Rows,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        *_: object,
        **__: object,
    ) -> tuple[
        Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap
    ]:
        """Send each token once to each rank that needs it.

        Returns:
            received rows, as `x` (a tensor, or FP8 rows with scales); their experts as local numbers, -1 for
            experts of other ranks; their weights, 0 there; rows per local expert, rounded up to
            `expert_alignment`; the handle; an event. With a `handle` of before, only rows and event. With
            `num_worst_tokens`, that many rows and no list.
        """
        parts = x if isinstance(x, tuple) else (x,)
        if handle is not None:
            rows = [self._rows(each, handle, 0) for each in parts]
            return tuple(rows) if isinstance(x, tuple) else rows[0], None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None:
            raise ConfigError(
                "is_token_in_rank", None, "give all results of get_dispatch_layout, or a handle"
            )
        num, num_ranks = len(is_token_in_rank), self.group_size
        told = self._mover.gather(torch.nn.functional.pad(num_tokens_per_expert, (1, 0), value=num)[None])
        sizes, per_expert = told[:, 0, 0], told[:, 0, 1:].sum(0)
        top_k = 0 if topk_idx is None else topk_idx.shape[1]
        part = sizes.new_zeros((int(sizes.max()), num_ranks + 2 * top_k), dtype=torch.int64)
        part[:num, :num_ranks] = is_token_in_rank
        if topk_idx is not None and topk_weights is not None:
            part[:num, num_ranks:] = torch.cat([topk_idx, topk_weights.double().view(torch.int64)], 1)
        told = self._mover.gather(part)
        handle = self._handle(told[..., :num_ranks].bool(), is_token_in_rank)
        num_local = len(per_expert) // num_ranks
        chosen = told[handle.places][:, num_ranks:]
        ids, words = chosen[:, :top_k] - self.rank * num_local, chosen[:, top_k:]
        is_mine = (ids >= 0) & (ids < num_local)
        local = torch.where(is_mine, ids, -1).to(torch.int64 if topk_idx is None else topk_idx.dtype)
        weights = torch.where(is_mine, words.view(torch.float64).float(), 0)
        if num_worst_tokens:
            if len(ids) > num_worst_tokens:
                raise ConfigError("num_worst_tokens", num_worst_tokens, f"give {len(ids)} or more")
            local, weights = _padded(local, num_worst_tokens, -1), _padded(weights, num_worst_tokens, 0)
        counts = per_expert.view(num_ranks, -1)[self.rank]
        aligned = (counts + expert_alignment - 1) // expert_alignment * expert_alignment
        rows = [self._rows(each, handle, num_worst_tokens) for each in parts]
        return (
            tuple(rows) if isinstance(x, tuple) else rows[0],
            None if topk_idx is None else local,
            None if topk_weights is None else weights,
            [] if num_worst_tokens else aligned.tolist(),
            handle,
            EventOverlap(),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum the rows of each token, without weights, plus up to two biases, and sum the weights."""
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        total = sum((each.float() for each in biases if each is not None), start=self._sum(x, handle))
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return total.to(x.dtype), weights, EventOverlap()

    def _rows(self, x: torch.Tensor, handle: DispatchHandle, num_worst: int) -> torch.Tensor:
        data = x.view(torch.uint8) if x.itemsize == 1 else x  # torch cannot index FP8
        received = self._mover.exchange(data, *self._masks(handle))[handle.places]
        return (_padded(received, num_worst, 0) if num_worst else received).view(x.dtype)

    def _sum(self, rows: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Sum rows at the source rank of their tokens, as float32."""
        sent = rows.new_zeros((self.group_size, handle.max_tokens, rows.shape[1]))
        sent[handle.places] = rows[: len(handle[3])]
        parts = self._mover.exchange(sent, *reversed(self._masks(handle)))
        return parts[:, : len(handle[4])].sum(0, dtype=torch.float32)

    def _masks(self, handle: DispatchHandle) -> list[torch.Tensor]:
        """Return which tokens this rank sends to each rank, and receives: bool[R, T] each."""
        sends, receives = handle[4].new_zeros((2, self.group_size, handle.max_tokens))
        sends[:, : len(handle[4])] = handle[4].T
        receives[handle.places] = True
        return [sends, receives]

    def _handle(self, needed: torch.Tensor, is_token_in_rank: torch.Tensor) -> DispatchHandle:
        """`needed`: bool[R, T, R], which rank's token is needed by which rank."""
        num_sent, places = needed.sum(1), needed[:, :, self.rank].nonzero().unbind(1)
        handle = DispatchHandle(
            (
                num_sent.cumsum(0).int(),
                num_sent[self.rank][:, None].int(),
                num_sent.new_zeros((self.group_size, 1), dtype=torch.int32),
                places[1].int(),
                is_token_in_rank,
                torch.where(is_token_in_rank, is_token_in_rank.cumsum(0) - 1, -1).int(),
            )
        )
        handle.max_tokens, handle.places = needed.shape[1], places
        return handle


def _padded(rows: torch.Tensor, num: int, value: int) -> torch.Tensor:
    padded = rows.new_full((num, *rows.shape[1:]), value)
    padded[: len(rows)] = rows
    return padded
