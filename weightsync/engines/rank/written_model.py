"""The model that updates write in one rank: the target, and the draft if that is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel, HasDraft
from weightsync.engines.drafts.frozen_draft import FrozenDraft
from weightsync.engines.drafts.trained_draft import TrainableDraft, TrainedDraft
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.loader_trace import Traced, trace
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.rank.host import Host, Rehearses
from weightsync.memory.tensors import device_id
from weightsync.plan import RankLayout, Segment
from weightsync.plan.layout.draft import Draft


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """The engine's model, with its draft as it is treated."""

    host: Host
    device: torch.device
    draft: DraftModel | None = None
    frozen: FrozenDraft | None = None
    trained: TrainedDraft | None = None

    def treated(self, treatment: Treatment | None) -> WrittenModel:
        """Return the model with `treatment` applied to the draft, see `Rank.treat`."""
        draft = self.host.draft(treatment) if isinstance(self.host, HasDraft) else None
        frozen, trained = self.frozen, None
        if draft and treatment == "frozen":
            frozen = frozen or FrozenDraft(draft, self.host.model(), self.device)
        if draft and treatment == "trained":
            assert isinstance(draft, TrainableDraft)
            frozen, trained = None, TrainedDraft(draft, self.host.model())
        return WrittenModel(self.host, self.device, draft, frozen, trained)

    def modules(self) -> torch.nn.Module:
        """Return all that updates write."""
        return self.trained.modules if self.trained else self.host.model()

    def live(self) -> dict[str, torch.Tensor]:
        """Return the current parameters and buffers by name."""
        model = self.modules()
        return {**dict(model.named_buffers()), **dict(model.named_parameters())}

    def checkpoint(self) -> Checkpoint:
        """Return the tensors that the loader takes. Raises as `Host.checkpoint`."""
        found = self.host.checkpoint()
        return self.trained.join(found) if self.trained else found

    def loader(self, stored: bool) -> Loader:
        """Return the loader of whole tensors, for one update. Raises as `Host.loader`."""
        loader = self.host.loader(stored)
        return self.trained.loader(loader) if self.trained else loader

    def stored_otherwise(self) -> str:
        """Return why live parameters may differ from the loader's bytes; "" if they do not."""
        return self.host.stored_otherwise() or (self.trained.draft.stored_otherwise() if self.trained else "")

    def traced(self, checkpoint: Checkpoint) -> Traced:
        """Find where the loader puts the tensors of `checkpoint`. Raises UnprovableError."""
        return trace(
            self.modules(), checkpoint.tensors, checkpoint.tied, device_id(self.device), self._load_weights
        )

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.trained:
            self.trained.load_weights(self.host.load_weights, weights)
        else:
            self.host.load_weights(weights)

    def whole_layout(self, checkpoint: Checkpoint) -> RankLayout:
        """Return a layout of whole tensors, without live buffers. Raises as `Rehearses.rehearse`."""
        kept = self.host.rehearse() if isinstance(self.host, Rehearses) else ()
        by_name = {meta.name: meta for meta in kept}
        tensors = tuple(by_name.get(meta.name, meta) for meta in checkpoint.tensors)
        return RankLayout(
            tensors,
            tuple(map(Segment.whole, tensors)),
            checkpoint.tied,
            device=device_id(self.device),
            converts=checkpoint.converts,
            stored=checkpoint.stored,
        )

    def with_draft(self, layout: RankLayout) -> RankLayout:
        """Return `layout` with a description of the draft."""
        if self.draft is None:
            return layout
        held = self.trained or self.frozen
        return replace(layout, draft=held.describe() if held else Draft(self.draft.method, self.draft.path))
