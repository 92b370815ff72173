"""The part of the public API for adapters, and for the list of served components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle

from weightsync.actors.adapters import Adapters
from weightsync.actors.coverage import coverage, draft_coverage
from weightsync.actors.membership import Membership
from weightsync.actors.models import Models
from weightsync.actors.own_actor import check_own_actor
from weightsync.actors.ray.handles import check_trainers
from weightsync.actors.ray.loop import LoopThread
from weightsync.actors.servers.door import with_ranks
from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError
from weightsync.report import Covered, SyncReport


class AdapterMethods:
    """Base of `WeightSync`, which sets the attributes."""

    config: SyncConfig
    _loop: LoopThread
    _adapters: Adapters
    _controller: Controller
    _fleet: Fleet
    _last: SyncReport | None
    _models: Models[Any]
    _members: Membership

    def register_adapter(
        self, name: str, trainers: Sequence[ActorHandle[Any]] | int, *, adapter: str = "default"
    ) -> None:
        """Reserve slots for a LoRA adapter on every engine, and connect the adapter's trainers.

        See docs/adapters.md.

        Call it after `connect`. Engines that come back after a crash get the adapter's version again.

        Args:
            name: the adapter's name in requests, such as ``{"adapter": "math"}``.
            trainers: all ranks in rank order, handles of actors derived from `TrainerShard`, with a PEFT
                model as ``self.model``; or the number of ranks that dial in with such a model, see
                `weightsync.join`. They may be the trainers of `register_trainers`, or others.
            adapter: the adapter's name in PEFT.

        Raises:
            ConfigError: the name is taken, PEFT's adapter does not exist or does more than A and B, or an
                engine has no slots for it; names the option to give.
            PlanError: engines and trainers differ in a tensor; names it.
            StateError: before `connect`.
            DeadlineError: a process did not answer within ``config.connect_timeout_s``; names it.
        """
        known = with_ranks(trainers, self.config)
        check_trainers(known, "model" if self._members.models and known is trainers else "")
        check_own_actor(known, {})
        if not isinstance(name, str) or not name:
            raise ConfigError("name", name, "give a text, which requests use")
        self._loop.submit(lambda: self._adapters.register(name, known, adapter)).result()

    def update_adapter(self, name: str, version: int | None = None) -> SyncReport:
        """Move an adapter's weights into the slots of all engines, as a new version of the adapter.

        Engines continue to make tokens. Requests that begin afterwards use the new version on every engine
        that loaded it. Running requests end with the version with which they began.

        Args:
            name: the adapter.
            version: larger than the adapter's version before; by default the next number.

        Returns:
            The report. `SyncReport.engines` has the engines that serve the version.

        Raises:
            ConfigError: no adapter has this name, or the version is not larger.
            DeadlineError: requests that use the version before the current one did not end in time.
            WeightSyncError: as `update_weights`.
        """
        return self._loop.submit(lambda: self._adapters.update(name, version)).result()

    def unregister_adapter(self, name: str) -> None:
        """Give an adapter's slots back. Requests that name it are refused from then on.

        Raises:
            ConfigError: no adapter has this name.
            DeadlineError: requests use it for more than a minute; that engine keeps its slots.
        """
        self._loop.submit(lambda: self._adapters.unregister(name)).result()

    def coverage(self) -> list[Covered]:
        """List the components that engines serve (model, draft, adapters), and how each was compared.

        Engines of other models come last, see `add_model`.

        `print` shows one line of a row. Empty before `connect`.
        """
        model = coverage("model", self._controller, self._fleet, self._last)
        draft = draft_coverage(self._controller, self._fleet, self._last)
        return model + draft + self._adapters.coverage() + self._models.coverage()

    def adapter_versions(self) -> dict[str, int]:
        """Return the committed version of each adapter; 0 before the adapter's first update."""
        return self._adapters.versions()
