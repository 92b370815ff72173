"""A process with several holders, such as those of all adapters at one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ray.actor import ActorHandle

from weightsync.actors.holders.weight_holder import process_options
from weightsync.actors.ray.actor_class import actor_class
from weightsync.actors.ray.placement import Placement
from weightsync.errors import StateError
from weightsync.holder.holder import Holder
from weightsync.protocol.daemon import on_daemon

T = TypeVar("T")

_NUM_CALLS = 1000
"""Calls of all parts of one process that may wait at the same time. They take no threads of Ray's."""


class HolderParts:
    """A process with several holders: its parts, by number.

    Each call runs on a thread of its own. So parts that wait for their peers keep no other part waiting, here
    or in the peers' processes.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Holder] = {}
        self._changing = asyncio.Lock()

    def __repr__(self) -> str:
        """Return the name with which Ray starts each line of its log."""
        return "holders of adapters"

    async def open_part(self, part: int, settings: Mapping[str, Any]) -> None:
        """Make a holder of `holder_settings`. Raises what `Holder` raises."""
        async with self._changing:
            self._parts[part] = await _on_thread(partial(Holder, **settings))

    async def call_part(self, part: int, method: str, *args: Any) -> Any:  # noqa: ANN401 - as the method
        """Call a method of one holder. Raises StateError if that was closed."""
        if part not in self._parts:
            raise StateError(f"part {part} of the holders of adapters was closed")
        return await _on_thread(partial(getattr(self._parts[part], method), *args))

    async def close_part(self, part: int) -> None:
        """End what one holder does, and free its memory. Safe to call twice."""
        async with self._changing:  # after `open_part`, which may still run
            holder = self._parts.pop(part, None)
        if holder:
            await _on_thread(holder.close)


async def _on_thread(call: Callable[[], T]) -> T:
    return await asyncio.wrap_future(on_daemon(call, "weightsync-part"))


def spawn_parts(placement: Placement, transport: str) -> ActorHandle[HolderParts]:
    """Start a `HolderParts` actor as `spawn_holder` starts a holder's. It ends with its driver."""
    options = process_options(placement.node, placement.gpu if transport == "nccl" else None, _NUM_CALLS)
    return actor_class(HolderParts).options(**options).remote()
