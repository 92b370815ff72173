"""Ray's actor classes, made once for each class."""

from __future__ import annotations

from typing import Any, TypeVar

import ray
from ray.actor import ActorClass

_Actor = TypeVar("_Actor")
_made: dict[type, ActorClass[Any]] = {}


def actor_class(cls: type[_Actor]) -> ActorClass[_Actor]:
    """Return the result of `ray.remote` for `cls`, the same result for all calls.

    Before the first actor of a class starts, Ray disassembles all methods of the class, for some 50 ms.
    """
    if cls not in _made:
        _made[cls] = ray.remote(cls)
    return _made[cls]
