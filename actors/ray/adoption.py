"""Calls our methods on actors of other people's classes, by Ray's ``__ray_call__``.

Ray runs such a function between the actor's own methods, and in actors with coroutines on a thread beside the
event loop. The function cannot be a coroutine. So a coroutine is started, and the caller asks until it has
ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, Literal, TypeAlias

import ray
from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]
from ray.actor import ActorHandle

from weightsync.errors import StateError

Where: TypeAlias = str | Callable[[Any], Any]
"""A path of attributes of the actor, such as ``actor.model``, or a function of the actor."""

_KINDS = {
    "trainer": "weightsync.actors.adopted:AdoptedTrainer",
    "engine": "weightsync.actors.adopted:AdoptedEngineActor",
}
_SOON_S, _LATER_S = 0.002, 0.25
_running: dict[str, Future[Any]] = {}
_parts: dict[bytes, Any] = {}
"""Our trainers and engines of this process's actor, by `Adoption.key`: an actor may have several models."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """How to find the model or the engine of an actor that knows nothing of weightsync.

    Attributes:
        kind: ``trainer`` or ``engine``.
        options: arguments of `AdoptedTrainer`.
        key: equal for equal adoptions, also of a later driver.
    """

    kind: Literal["trainer", "engine"]
    where: Where
    options: Mapping[str, Any] = field(default_factory=dict)
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        pickled: bytes = ray.cloudpickle.dumps((self.kind, self.where, dict(self.options)))
        object.__setattr__(self, "key", hashlib.sha256(pickled).digest())


def method_of(
    handle: ActorHandle[Any], method: str, adoption: Adoption | None = None
) -> Callable[..., Awaitable[Any]]:
    """Return a function that calls `method` of an actor, or of our part in another class's actor.

    The first call with an `adoption` makes the part. Without an `adoption`, the call goes to the actor's only
    part, and raises StateError if there is none, or several.
    """
    if hasattr(handle, method):
        remote: Callable[..., Awaitable[Any]] = getattr(handle, method).remote
        return remote
    if not method.startswith("sync_"):
        raise AttributeError(method)
    return partial(_call, handle, adoption, method)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A coroutine runs, and `_look` returns its result."""


async def _call(handle: ActorHandle[Any], adoption: Adoption | None, method: str, *args: object) -> Any:  # noqa: ANN401
    ticket, pause_s = uuid.uuid4().hex, _SOON_S
    try:
        answer = await handle.__ray_call__.remote(_begin, adoption, ticket, method, *args)
        while isinstance(answer, _Pending):
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LATER_S)
            answer = await handle.__ray_call__.remote(_look, ticket)
    except asyncio.CancelledError:
        handle.__ray_call__.remote(_drop, ticket)
        raise
    return answer


def _begin(actor: object, adoption: Adoption | None, ticket: str, method: str, *args: object) -> object:
    answer = getattr(_part(actor, adoption, method), method)(*args)
    if not inspect.iscoroutine(answer):
        return answer
    _running[ticket] = asyncio.run_coroutine_threadsafe(answer, actor_loop() or _own_loop())
    return _Pending()


def _look(_: object, ticket: str) -> object:
    return _running.pop(ticket).result() if _running[ticket].done() else _Pending()


def _drop(_: object, ticket: str) -> None:
    if called := _running.pop(ticket, None):
        called.cancel()


def _part(actor: object, adoption: Adoption | None, method: str) -> object:
    if adoption:
        if adoption.key not in _parts:
            made = resolve_name(_KINDS[adoption.kind])  # imported here, since the driver needs no torch
            _parts[adoption.key] = made(actor, adoption.where, **adoption.options)
        return _parts[adoption.key]
    found = [each for each in _parts.values() if hasattr(each, method)]
    if len(found) != 1:
        how_many = "several models or engines" if found else "no model or engine"
        raise StateError(f"{type(actor).__name__} was registered with {how_many}: register it with one")
    return found[0]


def actor_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this process's actor, None for an actor without coroutines."""
    worker = ray._private.worker.global_worker.core_worker
    if not worker.current_actor_is_asyncio():
        return None
    # Ray has no public names for these.
    loop: asyncio.AbstractEventLoop = worker.get_event_loop(PythonFunctionDescriptor("", "", "", ""), "")[0]
    return loop


@cache
def _own_loop() -> asyncio.AbstractEventLoop:
    """Return a loop on a thread of its own, for actors without coroutines."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="weightsync-adopted", daemon=True).start()
    return loop
