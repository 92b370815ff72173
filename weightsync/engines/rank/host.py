"""Calls from a rank to the engine that it is part of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.whole_loads import Converts
from weightsync.engines.loading.whole_sink import Loader
from weightsync.plan import RankLayout, TensorMeta
from weightsync.plan.layout.arrangement import Experts


class Host(Converts, Protocol):
    """Calls from a rank to the engine that it is part of."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the model's own loader on tensors of `checkpoint`, which it iterates over lazily."""

    def checkpoint(self) -> Checkpoint:
        """Return the full-precision checkpoint of the engine's model. Raises ConfigError if it has none."""

    def stored_otherwise(self) -> str:
        """Return why live parameters may differ from the loader's bytes; "" if they do not."""

    def loader(self, stored: bool) -> Loader:
        """Return the engine's loader of whole tensors, for one update. Raises EngineError if it has none.

        `stored`: they are those that the engine's own checkpoint stores, see `Checkpoint`.
        """


@runtime_checkable
class Rehearses(Protocol):
    """A host that can run the loader without tensors."""

    def rehearse(self) -> Sequence[TensorMeta]:
        """Return the tensors of `Host.checkpoint` that are known in the dtypes that the loader keeps.

        Nothing changes. Raises ConfigError if the loader leaves out a tensor.
        """


@runtime_checkable
class ArrangesExperts(Protocol):
    """A host whose engine may move experts between slots."""

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks now, by layer. Empty if experts stay."""

    def move_experts(self, experts: Experts) -> None:
        """Copy experts between slots, all ranks at the same time."""

    def arranged(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> RankLayout:
        """Return the layout of the loader for the experts that are in the slots now.

        `live` has the layout's buffers. Raises UnprovableError.
        """


@runtime_checkable
class KnowsSleep(Protocol):
    """A host that can name the memory that sleeps, also if other code put it to sleep."""

    def asleep(self) -> Collection[str]:
        """Return the parts that have no memory now, such as ``weights``."""
