"""Trainers and engines that are in actors of other people's classes."""

from __future__ import annotations

from inspect import signature
from typing import Any

from weightsync.actors.engine_calls import EngineCalls
from weightsync.actors.ray.adoption import Where, actor_loop
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.engines import Engine
from weightsync.engines.vllm.adopted import AdoptedVllm
from weightsync.errors import ConfigError, nearest

_ENGINE = ("layout", "attach", "pause", "load", "resume", "serving")


class AdoptedTrainer(TrainerShard):
    """A trainer rank whose model belongs to another actor."""

    def __init__(self, actor: object, where: Where, **options: Any) -> None:  # noqa: ANN401
        """`options`: arguments of `TrainerShard`. Raises ConfigError for another, and names the nearest."""
        known = signature(TrainerShard).parameters
        if unknown := options.keys() - known:
            raise ConfigError("options", min(unknown), nearest(min(unknown), known))
        super().__init__(**options)
        self._actor, self._where = actor, where

    @property
    def model(self) -> Any:  # noqa: ANN401 - looked up again for each update
        return found(self._actor, "model", self._where)


class AdoptedEngineActor(EngineCalls):
    """An engine that belongs to another actor: an ``AsyncLLM``, or an `Engine`."""

    _llm: Any = None

    def __init__(self, actor: object, where: Where) -> None:
        self._actor, self._where = actor, where

    @property
    def _engine(self) -> Engine:  # type: ignore[override]
        """The engine that the actor has now. Updates fail if it is another one than at `connect`."""
        llm = found(self._actor, "llm", self._where)
        if llm is not self._llm:
            self._made, self._llm, self._layouts = self._adopted(llm), llm, None
        return self._made

    def _adopted(self, llm: Any) -> Engine:  # noqa: ANN401 - what the actor has
        if all(hasattr(llm, method) for method in _ENGINE):
            engine: Engine = llm
            return engine
        loop = actor_loop()
        if not hasattr(llm, "collective_rpc") or loop is None:
            remedy = "give the path of a vLLM AsyncLLM in an actor with coroutines, or of an Engine"
            raise ConfigError("llm", f"{type(llm).__name__} of {type(self._actor).__name__}", remedy)
        return AdoptedVllm(llm, loop)


def found(actor: object, field: str, where: Where) -> object:
    """Return the value at the attribute path `where`, or the result of the function `where`.

    Raises ConfigError if an attribute is missing. Names the nearest one.
    """
    if not isinstance(where, str):
        return where(actor)
    value = actor
    for name in where.split("."):
        if not hasattr(value, name):
            known = [each for each in {*vars(value), *dir(type(value))} if not each.startswith("__")]
            owner = type(value).__name__
            raise ConfigError(field, where, f"{owner} has no attribute {name!r}: {nearest(name, known)}")
        value = getattr(value, name)
    return value
