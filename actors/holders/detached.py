"""Detached actors: their names, how a new driver finds them, and how they end."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from weightsync.errors import ConfigError, StateError

NAMESPACE = "weightsync"
_PATIENCE_S = 10.0


def run_prefix(run: object) -> str:
    """Return the prefix of the names of a run's actors. Raises ConfigError for an invalid run name."""
    if not isinstance(run, str) or not run or "/" in run:
        raise ConfigError("name", run, "give a text without a slash")
    return f"weightsync/{run}/"


def actor_name(run: str, *parts: str) -> str:
    """Return the name of one of a run's actors."""
    return run_prefix(run) + "/".join(parts)


def detached(name: str) -> dict[str, str]:
    """Return Ray's options for an actor of that name that outlives its driver."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


def find(name: str) -> ActorHandle[Any] | None:
    """Return the living actor of that name, or None."""
    try:
        handle: ActorHandle[Any] = ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None
    return handle


def names(prefix: str) -> list[str]:
    """Return the names of all living actors that begin with `prefix`, sorted."""
    listed: list[Any] = list_named_actors(all_namespaces=True)
    found = (each["name"] for each in listed if each["namespace"] == NAMESPACE)
    return sorted(name for name in found if name.startswith(prefix))


def end(name: str) -> None:
    """Kill any actor of that name and wait until the name is free. Raises StateError after ten seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while handle := find(name):
        ray.kill(handle)
        if time.monotonic() > deadline:
            raise StateError(f"actor {name} does not end")
        time.sleep(0.01)


def end_all(run: str) -> None:
    """Kill all of a run's actors."""
    for name in names(run_prefix(run)):
        end(name)
