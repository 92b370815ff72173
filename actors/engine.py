"""The engine's process: an adapter behind awaitable methods."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.seat import Seat
from weightsync.engines import Rollout, choose_engine, make_engine
from weightsync.faults import strike

if TYPE_CHECKING:
    from weightsync.buffers import Attached
    from weightsync.clock import Span
    from weightsync.faults import Fault
    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan, RankLayout
    from weightsync.verify import Digests

__all__ = ["EngineActor"]


class EngineActor:
    """One inference engine. Its methods are coroutines, so that `generate` and `load` can overlap.

    Args:
        kind: ``vllm``, ``sglang``, ``torch``, or ``auto`` for the first of these that is installed.
        model_path: a Hugging Face model directory; its config and tokenizer are read, its weights are not.
        name: as registered with WeightSync.
        options: passed to the adapter, see `weightsync/engines/README.md`.
        slot: where weights lie in host memory, the name of the slot, of rank r > 0 ``<slot>.<r>``; the
            trainer with the same slot shares its holder. On GPUs, it is the trainer with the same GPU.
    """

    def __init__(
        self,
        kind: str,
        model_path: str,
        name: str,
        options: Mapping[str, Any] | None = None,
        slot: str | None = None,
    ) -> None:
        self._kind, self._why = choose_engine(kind)
        self._slot, self._name = slot, name
        self._engine = make_engine(self._kind, model_path, name, options or {})
        self._layouts: Sequence[RankLayout] | None = None

    async def info(self) -> dict[str, str]:
        """``kind`` of engine and ``why`` it was chosen."""
        return {"kind": self._kind, "why": self._why}

    async def sync_seats(self) -> list[Seat]:
        """Where each rank sits: on the device that its layout names."""
        layouts = await self.sync_layout()
        return [self._seat(layout.device, rank) for rank, layout in enumerate(layouts)]

    async def sync_layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`; asked for once, since what it says does not change."""
        if self._layouts is None:
            self._layouts = await asyncio.to_thread(self._engine.layout)
        return self._layouts

    async def sync_attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
    ) -> Sequence[Attached]:
        """See `Engine.attach`."""
        return await asyncio.to_thread(self._engine.attach, plan, tickets, timeout_s)

    async def sync_pause(self, mode: str, timeout_s: float) -> None:
        """See `Engine.pause`."""
        strike("pause")
        await asyncio.to_thread(self._engine.pause, mode, timeout_s)

    async def sync_load(
        self, attempt: int, timeout_s: float
    ) -> tuple[Sequence[Digests], Sequence[Sequence[Span]]]:
        """See `Engine.load`, and `Engine.spans` for what it took."""
        digests = await asyncio.to_thread(self._engine.load, attempt, timeout_s)
        return digests, self._engine.spans()

    async def sync_resume(self, version: int) -> None:
        """See `Engine.resume`."""
        strike("commit", version=version)
        await asyncio.to_thread(self._engine.resume, version)

    async def sync_serving(self) -> int:
        """See `Engine.serving`."""
        return self._engine.serving()

    async def sync_watch(self) -> None:
        """Ends with this process: Ray fails a call that waits in it as soon as it is gone."""
        await asyncio.Event().wait()

    async def sync_arm(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `Engine.arm`."""
        await asyncio.to_thread(self._engine.arm, who, faults, seed)

    async def sync_ping(self) -> None:
        """An answer, while this process is able to give one; see `Engine.check`."""
        self._engine.check()

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Rollout:
        """Complete token-id prompts; see `Engine.generate`."""
        return await asyncio.to_thread(self._engine.generate, prompts, sampling)

    async def close(self) -> None:
        """End the engine."""
        await asyncio.to_thread(self._engine.close)

    def _seat(self, device: str, rank: int) -> Seat:
        # Always by a slot, which leaves CUDA alone: further ranks have processes of their own.
        slot = f"pid-{os.getpid()}" if self._slot is None else self._slot
        seat = Seat.here(f"{slot}.{rank}" if rank else slot)
        return dataclasses.replace(seat, device=device) if device else seat
