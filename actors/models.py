"""Other models of one WeightSync, with their own trainers, engines and versions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from weightsync.actors.joint_update import JointPart
from weightsync.actors.ray.loop import LoopThread
from weightsync.errors import ConfigError, nearest
from weightsync.report import Covered

MODEL, _DRAFT, _ADAPTER = "model", "draft", "adapter "


class _Syncs(Protocol):
    """A WeightSync, as another WeightSync uses it."""

    def connect(self) -> None: ...
    def close(self) -> None: ...
    def coverage(self) -> list[Covered]: ...


S = TypeVar("S", bound=_Syncs)


@dataclass(frozen=True, slots=True)
class Model(Generic[S]):
    """One model.

    Attributes:
        sync: the model's WeightSync.
        loop: the loop on which this WeightSync's updates run.
        as_part: returns the model as a part of a joint update.
    """

    sync: S
    loop: LoopThread
    as_part: Callable[[], JointPart]


class Models(Generic[S]):
    """Models by name, without those that were closed."""

    def __init__(self) -> None:
        self._held: dict[str, Model[S]] = {}

    @property
    def held(self) -> Mapping[str, Model[S]]:
        """The models that are open."""
        return {name: model for name, model in self._held.items() if not model.loop.closed}

    def add(self, name: str, model: Model[S]) -> None:
        """Add a model. `check` the name first."""
        self._held[name] = model

    def check(self, name: object) -> None:
        """Raise ConfigError unless `name` can be a new model's name."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError("name", name, "give a text without a slash")
        if name in (MODEL, _DRAFT) or name.startswith(_ADAPTER):
            raise ConfigError("name", name, f"choose another than {MODEL}, {_DRAFT} and {_ADAPTER}…")
        if name in self.held:
            raise ConfigError("name", name, f"choose a name other than {', '.join(self.held)}")

    def parts(
        self, names: Collection[str], others: Mapping[str, Callable[[], JointPart]]
    ) -> dict[str, JointPart]:
        """Return the named components, of these models and of `others`. Raises ConfigError."""
        known = {name: model.as_part for name, model in self.held.items()} | dict(others)
        for name in names:
            if name not in known:
                raise ConfigError("components", name, nearest(name, known))
        return {name: known[name]() for name in names}

    def loops(self, names: Collection[str]) -> list[LoopThread]:
        """Return the loops on which updates of the named models run."""
        return [model.loop for name, model in self.held.items() if name in names]

    def coverage(self) -> list[Covered]:
        """Return the coverage of all models, with the model's name in each component's name."""
        return [
            replace(row, component=name if row.component == MODEL else f"{name}: {row.component}")
            for name, model in self.held.items()
            for row in model.sync.coverage()
        ]

    def connect(self) -> None:
        """Connect all models."""
        for model in self.held.values():
            model.sync.connect()

    def close(self) -> None:
        """Close all models."""
        for model in self.held.values():
            model.sync.close()
