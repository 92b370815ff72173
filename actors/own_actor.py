"""Refuses calls of an actor that would wait for the same actor's answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from weightsync.errors import ConfigError

_REMEDY = (
    "it is the actor that makes this call, and cannot answer while it waits: call from the driver, from "
    "another actor, or from another thread of this one"
)


def check_own_actor(trainers: Sequence[ActorHandle[Any]], engines: Mapping[str, ActorHandle[Any]]) -> None:
    """Raise ConfigError if the calling actor is among `trainers` or `engines`.

    An actor's constructor and methods run on the main thread, and coroutines on an event loop. On other
    threads, the actor can still answer, such as on threads of ``max_concurrency``, or the user's own.
    """
    context = ray.get_runtime_context()
    if context.get_actor_id() is None or not _is_busy():
        return
    named = {f"trainers[{rank}]": handle for rank, handle in enumerate(trainers)}
    named |= {f"engines[{name!r}]": handle for name, handle in engines.items()}
    for field, handle in named.items():
        if handle == context.current_actor:
            raise ConfigError(field, handle, _REMEDY)


def _is_busy() -> bool:
    """Return True if Ray runs nothing else of this actor while this thread waits."""
    if threading.current_thread() is threading.main_thread():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
