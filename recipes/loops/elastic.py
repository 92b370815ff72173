"""Adds, removes and kills engines during a run, as in a recipe's events."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync import WeightSync
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.calls import collect
from weightsync.recipes.fleet.launcher import Launcher
from weightsync.recipes.report.screen import Screen


class Elastic:
    """Carries out the events of `recipe`. Training does not wait for engines that start.

    Attributes:
        infos: the `info` of engines that joined.
    """

    def __init__(self, recipe: Recipe, sync: WeightSync, launcher: Launcher, screen: Screen) -> None:
        self._recipe, self._sync, self._launcher, self._screen = recipe, sync, launcher, screen
        self._coming: dict[str, tuple[ActorHandle[Any], ObjectRef[Any]]] = {}  # started, not up yet
        self.infos: dict[str, dict[str, str]] = {}

    def before(self, step: int) -> None:
        """Carry out the events of `step`, and add engines that are up."""
        for event in (event for event in self._recipe.events if event.step == step):
            self._screen.line(f"before step {step}: {event.action} engine {event.engine}")
            if event.action == "add":
                engine = self._launcher.engine(event.engine)
                self._coming[event.engine] = engine, engine.info.remote()
                continue
            self.wait_healed([event.engine])
            engine = self._sync.serving()[event.engine]
            if event.action == "remove":
                self._sync.remove_engine(event.engine)
            ray.kill(engine)
        self._join()

    def wait_healed(self, awaited: Collection[str]) -> None:
        """Wait until the `awaited` engines have joined and all are healed."""
        self._join(awaited)
        self._sync.settle(self._recipe.sync.connect_timeout_s)

    def _join(self, awaited: Collection[str] = ()) -> None:
        up = {
            name: info
            for name, (_, info) in self._coming.items()
            if name in awaited or ray.wait([info], timeout=0)[0]
        }
        self.infos |= collect(up, "start", self._recipe.sync.connect_timeout_s)
        for name in up:
            self._sync.add_engine(name, self._coming.pop(name)[0])
            version = self._sync.engine_versions()[name]
            self._screen.line(f"engine {name} joined, and serves version {version}")
