"""Ray's actor classes, made once for each class."""

from __future__ import annotations

from typing import Any, TypeVar

import ray
from ray.actor import ActorClass

_Actor = TypeVar("_Actor")
_made: dict[type, ActorClass[Any]] = {}


def actor_class(cls: type[_Actor]) -> ActorClass[_Actor]:
    """Return what `ray.remote` makes of `cls`, the same one each time.

    Ray disassembles all methods of each actor class before its first actor starts, for some 50 ms.
    """
    if cls not in _made:
        _made[cls] = ray.remote(cls)
    return _made[cls]
