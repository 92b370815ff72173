"""A draft model that updates write together with the target: one layout, one load, one verification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import torch

from weightsync.engines.drafts.draft_model import DraftModel, own_modules
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.whole_sink import Loader
from weightsync.plan.layout.draft import DRAFT, Draft

_Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TrainableDraft(DraftModel, ABC):
    """A draft whose own tensors an engine can load again. Names are those of the draft's checkpoint."""

    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """Return the draft's own tensors, without those that are in the target's memory."""

    @abstractmethod
    def shared(self) -> Mapping[str, str]:
        """Return the parameters of the target that the draft uses, by names in the draft's checkpoint."""

    @abstractmethod
    def load_weights(self, weights: _Weights) -> None:
        """Run the draft's own loader on tensors of `checkpoint`, which it iterates over lazily."""

    @abstractmethod
    def loader(self) -> Loader:
        """Return the engine's loader of the draft's own tensors, for one update."""

    @abstractmethod
    def stored_otherwise(self) -> str:
        """Return why the live parameters may differ from the loader's bytes; "" if they do not."""


class TrainedDraft:
    """A rank's draft, joined with the target.

    Attributes:
        draft: the draft.
        modules: the modules of both; names of the draft's modules begin with `DRAFT`.
    """

    def __init__(self, draft: TrainableDraft, target: torch.nn.Module) -> None:
        self.draft = draft
        self.modules = _Served(target, draft.model)

    def describe(self) -> Draft:
        """Return the description for the driver. The tensors are in the layout."""
        return Draft(self.draft.method, self.draft.path, trained=True)

    def join(self, target: Checkpoint) -> Checkpoint:
        """Return the tensors of both. Shared tensors of the draft are tied to the target's tensors."""
        own = self.draft.checkpoint()
        names, aliases = {meta.name for meta in target.tensors}, dict(target.tied)
        shared = [(name, aliases.get(held, held)) for name, held in self.draft.shared().items()]
        return replace(
            target,
            tensors=(*target.tensors, *(replace(meta, name=DRAFT + meta.name) for meta in own.tensors)),
            tied=(
                *target.tied,
                *((DRAFT + alias, DRAFT + name) for alias, name in own.tied),
                *((DRAFT + alias, name) for alias, name in shared if name in names),
            ),
        )

    def load_weights(self, load_target: Callable[[_Weights], None], weights: _Weights) -> None:
        """Run both loaders on tensors that come one at a time, the target's first."""
        left, first = iter(weights), list[tuple[str, torch.Tensor]]()

        def of_target() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in left:
                if name.startswith(DRAFT):
                    first.append((name, tensor))
                    return
                yield name, tensor

        load_target(of_target())
        self.draft.load_weights((name.removeprefix(DRAFT), tensor) for name, tensor in chain(first, left))

    def loader(self, target: Loader) -> Loader:
        """Return a loader of both, for one update."""
        return _LoaderOfBoth(target, self.draft.loader)


class _LoaderOfBoth:
    """Loads the draft once the target is live: modules that they share cannot be in two reloads at a time."""

    def __init__(self, target: Loader, make_draft: Callable[[], Loader]) -> None:
        self._target, self._make_draft = target, make_draft
        self._draft: Loader | None = None
        self._kept: list[tuple[str, torch.Tensor]] = []

    def load(self, weights: _Weights) -> None:
        of_target = []
        for name, tensor in weights:
            if name.startswith(DRAFT):
                self._kept.append((name.removeprefix(DRAFT), tensor))
            else:
                of_target.append((name, tensor))
        if of_target:
            self._target.load(of_target)

    def finish(self) -> None:
        self._target.finish()
        self._draft = self._make_draft()
        self._draft.load(self._kept)
        self._kept = []
        self._draft.finish()

    def abandon(self) -> None:
        self._kept = []
        (self._draft or self._target).abandon()


class _Served(torch.nn.Module):
    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module) -> None:
        super().__init__()
        self._both = target, draft  # in a tuple, they are no children

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        target, draft = self._both
        yield from target.named_modules(memo, prefix, remove_duplicate)
        for path, module in own_modules(draft, target):
            yield (f"{DRAFT}{path}" if path else DRAFT.rstrip("/")), module
