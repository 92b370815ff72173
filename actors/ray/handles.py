"""Checks users' arguments: handles of actors of the right kind without repeats, and versions."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from ray.actor import ActorClass, ActorHandle

from weightsync.actors.servers.handle import JoinedServer
from weightsync.actors.servers.rank import JoinedRank
from weightsync.errors import ConfigError, nearest

_KINDS = {"sync_placement": "TrainerShard", "sync_placements": "EngineActor or VllmActor"}
"""A method that only this kind of actor has, and the base class."""


def check_trainers(handles: object, adopted: str = "") -> None:
    """Raise ConfigError unless `handles` is a list of trainer actors, each given once.

    `adopted`: the field that says where the model of other people's actors is, if it was given.
    """
    if not isinstance(handles, Sequence) or isinstance(handles, str) or not handles:
        raise ConfigError("trainers", handles, "give a list of at least one actor handle")
    _check([(f"trainers[{rank}]", handle) for rank, handle in enumerate(handles)], "sync_placement", adopted)


def check_engines(handles: object, adopted: str = "") -> None:
    """Raise ConfigError unless `handles` maps names to engine actors, each given once.

    `adopted`: as of `check_trainers`.
    """
    if not isinstance(handles, Mapping) or not handles:
        raise ConfigError("engines", handles, "give a dict of at least one name and actor handle")
    for name in handles:
        if not isinstance(name, str) or not name:
            raise ConfigError("engines", name, "give a text as the name of an engine")
    _check([(f"engines[{name!r}]", handle) for name, handle in handles.items()], "sync_placements", adopted)


def check_deployments(deployments: object, engines: Collection[str]) -> None:
    """Raise ConfigError unless `deployments` maps names to lists of engines. No two name the same engine."""
    if not isinstance(deployments, Mapping):
        remedy = 'give a dict of names to engines, such as {"pd": ["prefill", "decode"]}'
        raise ConfigError("deployments", deployments, remedy)
    seen: dict[str, object] = {}
    for name, members in deployments.items():
        field = f"deployments[{name!r}]"
        if not isinstance(members, Sequence) or isinstance(members, str) or not members:
            raise ConfigError(field, members, "give a list of names of engines")
        for member in members:
            if member not in engines:
                raise ConfigError(field, member, nearest(str(member), engines))
            if member in seen:
                raise ConfigError(field, member, f"it is in deployment {seen[member]!r} already")
            seen[member] = name


def check_version(version: int | None, newest: int) -> int:
    """Return `version` as an int, by default the one after `newest`. Raises ConfigError if it is no number.

    NumPy's integers are accepted, booleans are not.
    """
    if version is None:
        return newest + 1
    if not isinstance(version, bool):
        with suppress(TypeError):
            return operator.index(version)
    raise ConfigError("version", version, f"give a whole number, such as {newest + 1}, or nothing")


def _check(handles: Iterable[tuple[str, object]], method: str, adopted: str) -> None:
    seen: dict[ActorHandle[object], str] = {}
    urls: dict[str, str] = {}
    for field, handle in handles:
        if isinstance(handle, (type, ActorClass)):
            raise ConfigError(field, handle, "it is a class: start an actor of it, and give its handle")
        if isinstance(handle, JoinedServer):
            if handle.url in urls:
                raise ConfigError(field, handle.url, f"{urls[handle.url]} is the same server")
            urls[handle.url] = field
            continue
        if isinstance(handle, JoinedRank):
            if adopted:
                raise ConfigError(adopted, field, "leave it out: the rank gives it to weightsync.join")
            continue
        if not isinstance(handle, ActorHandle):
            remedy = f"give the handle of an actor derived from {_KINDS[method]}"
            raise ConfigError(field, handle, remedy)
        is_ours = hasattr(handle, method)
        if adopted and is_ours:
            raise ConfigError(adopted, field, f"leave it out: this actor is derived from {_KINDS[method]}")
        if not adopted and not is_ours:
            others = [kind for other, kind in _KINDS.items() if hasattr(handle, other)]
            derived = f"this one is of {others[0]}" if others else "this one is of neither kind"
            remedy = f"give the handle of an actor derived from {_KINDS[method]}; {derived}"
            raise ConfigError(field, handle, remedy)
        if handle in seen:
            raise ConfigError(field, handle, f"{seen[handle]} is the same actor: start one for each")
        seen[handle] = field
