"""Engines that are told what to do with cached prefixes."""

from __future__ import annotations

from tests.fleets.actors import Engine
from weightsync.config import PrefixCache
from weightsync.engines.serving.checks import refuse_salt
from weightsync.testing import DictEngine


class Caches(DictEngine):
    treatment: PrefixCache = "drop"

    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        self.treatment = treatment


class CannotSalt(DictEngine):
    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        refuse_salt(treatment, self.name, "its caches know no versions")


class Caching(Engine):
    def __init__(self, width: int, name: str, cls: type[DictEngine] = Caches) -> None:
        super().__init__(width, name, name)
        self._engine = cls(name, self._engine.tensors)

    async def treatment(self) -> PrefixCache:
        return self._engine.treatment
