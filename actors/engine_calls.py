"""What WeightSync calls on an engine's actor."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from weightsync.actors.claim import Claimable
from weightsync.actors.placement import Placement
from weightsync.engines import Engine
from weightsync.faults import inject

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.plan import Plan, RankLayout
    from weightsync.protocol.handles import Attached
    from weightsync.protocol.messages import Digests, FeedTicket
    from weightsync.protocol.timing import Span

__all__ = ["EngineCalls"]


class EngineCalls(Claimable):
    """Awaitable calls to the adapter `_engine`, so that they can overlap with what else the actor does."""

    _engine: Engine
    _slot: str | None = None
    _layouts: Sequence[RankLayout] | None = None

    async def sync_placements(self) -> list[Placement]:
        """Where each rank sits: on the device that its layout names."""
        layouts = await self.sync_layout()
        return [self._place(layout.device, rank) for rank, layout in enumerate(layouts)]

    async def sync_layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`; asked for once, since what it says does not change."""
        async with self._asking:
            if self._layouts is None:
                self._layouts = await asyncio.to_thread(self._engine.layout)
        return self._layouts

    @cached_property
    def _asking(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def sync_attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
    ) -> Sequence[Attached]:
        """See `Engine.attach`."""
        return await asyncio.to_thread(self._engine.attach, plan, tickets, timeout_s)

    async def sync_pause(self, mode: str, timeout_s: float) -> None:
        """See `Engine.pause`."""
        inject("pause")
        await asyncio.to_thread(self._engine.pause, mode, timeout_s)

    async def sync_sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """See `Engine.sleep`."""
        await asyncio.to_thread(self._engine.sleep, level, mode, timeout_s)

    async def sync_load(
        self, attempt: int, timeout_s: float
    ) -> tuple[Sequence[Digests], Sequence[Sequence[Span]]]:
        """See `Engine.load`, and `Engine.spans` for what it took."""
        digests = await asyncio.to_thread(self._engine.load, attempt, timeout_s)
        return digests, self._engine.spans()

    async def sync_resume(self, version: int) -> None:
        """See `Engine.resume`."""
        inject("commit", version=version)
        await asyncio.to_thread(self._engine.resume, version)

    async def sync_serving(self) -> int:
        """See `Engine.serving`."""
        return self._engine.serving()

    async def sync_watch(self) -> None:
        """Ends with this process: Ray fails a call that waits in it as soon as it is gone."""
        await asyncio.Event().wait()

    async def sync_set_faults(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `Engine.set_faults`."""
        await asyncio.to_thread(self._engine.set_faults, who, faults, seed)

    async def sync_ping(self) -> None:
        """An answer, while this process is able to give one; see `Engine.check`."""
        self._engine.check()

    def _place(self, device: str, rank: int) -> Placement:
        # Always by a slot, which leaves CUDA alone: further ranks have processes of their own.
        slot = f"pid-{os.getpid()}" if self._slot is None else self._slot
        placement = Placement.here(f"{slot}.{rank}" if rank else slot)
        return dataclasses.replace(placement, device=device) if device else placement
