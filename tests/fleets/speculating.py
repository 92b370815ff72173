"""A host of a rank that speculates. Its draft uses the target's embedding; both have a fused layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from tests.fleets.rank_engine import RankEngine
from weightsync.config import Components, Treatment
from weightsync.engines.drafts.draft_model import DraftModel
from weightsync.engines.drafts.trained_draft import TrainableDraft
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.rank.rank import Rank
from weightsync.memory.tensors import meta_of, named_tensors

Weights = Iterable[tuple[str, torch.Tensor]]
WIDTH = 256


class TrainersTarget(nn.Module):
    """A trainer's target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)


class TrainersDraft(nn.Module):
    """A trainer's draft."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, 2, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


class Fused(nn.Module):
    """A layer of an engine, whose parameter holds two of a checkpoint's."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.zeros(sum(rows), WIDTH), requires_grad=False)

    def load(self, part: int, weight: torch.Tensor) -> None:
        self.weight.data.narrow(0, sum(self.rows[:part]), self.rows[part]).copy_(weight)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.updown = nn.Embedding(6, WIDTH), Fused(8, 8)
        self.embed.weight.data.zero_()

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            layer = name.removesuffix(".weight")
            if layer == "embed":
                self.embed.weight.data.copy_(weight)
            else:
                self.updown.load(("up", "down").index(layer), weight)


class Draft(nn.Module):
    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed, self.qk, self.norm = target.embed, Fused(6, 2), nn.LayerNorm(WIDTH)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            layer, _, leaf = name.rpartition(".")
            if layer in ("norm", "embed"):
                getattr(self.get_submodule(layer), leaf).data.copy_(weight)
            else:
                self.qk.load(("q", "k").index(layer), weight)


class Copying(Loader):
    """Loads a model as an engine on a CPU: of whole tensors, at the end."""

    def __init__(self, model: Target | Draft, events: list[str]) -> None:
        self._model, self._events, self._held = model, events, list[tuple[str, torch.Tensor]]()
        self._name = type(model).__name__.lower()
        events.append(f"{self._name} begins")

    def load(self, weights: Weights) -> None:
        self._held += weights

    def finish(self) -> None:
        self._events.append(f"{self._name} finishes")
        with torch.no_grad():
            self._model.load_weights(self._held)

    def abandon(self) -> None:
        self._events.append(f"{self._name} is abandoned")


class FusedDraft(TrainableDraft):
    __slots__ = ("events",)

    def checkpoint(self) -> Checkpoint:
        return checkpoint_of(TrainersDraft())

    def shared(self) -> Mapping[str, str]:
        return {"embed.weight": "embed.weight"}

    def load_weights(self, weights: Weights) -> None:
        self.model.load_weights(weights)  # type: ignore[operator]

    def loader(self) -> Copying:
        return Copying(self.model, [])  # type: ignore[arg-type]

    def stored_otherwise(self) -> str:
        return ""


class SpeculatingHost:
    """The `Host` of a rank. With `packs`, it loads whole tensors."""

    def __init__(self, packs: bool = False) -> None:
        self.packs = packs
        self.target = Target()
        self.drafting = Draft(self.target)

    def model(self) -> Target:
        return self.target

    def load_weights(self, weights: Weights) -> None:
        self.target.load_weights(weights)

    def checkpoint(self) -> Checkpoint:
        return checkpoint_of(TrainersTarget())

    def stored_otherwise(self) -> str:
        return "it packs weights" if self.packs else ""

    def converted(self) -> None: ...

    def places(self) -> None: ...

    def loader(self, stored: bool) -> Copying:
        return Copying(self.target, [])

    def draft(self, treatment: Treatment | None) -> DraftModel:
        kind = FusedDraft if treatment == "trained" else DraftModel
        return kind("fused", "a/draft", self.drafting)

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what it serves, by the trainers' names."""
        yield "embed.weight", self.target.embed.weight
        yield "up.weight", self.target.updown.weight[:8]
        yield "down.weight", self.target.updown.weight[8:]
        yield "draft/q.weight", self.drafting.qk.weight[:6]
        yield "draft/k.weight", self.drafting.qk.weight[6:]
        yield "draft/norm.weight", self.drafting.norm.weight
        yield "draft/norm.bias", self.drafting.norm.bias


class SpeculatingEngine(RankEngine):
    """An engine of one rank, with a draft."""

    def __init__(self, name: str, packs: bool = False) -> None:
        super().__init__(name, {})
        self.host = SpeculatingHost(packs)
        self.rank = Rank("test", 0, torch.device("cpu"), self.host)

    def use_components(self, components: Components) -> None:
        self.rank.treat(components.get("draft"))


def checkpoint_of(model: nn.Module) -> Checkpoint:
    tensors, tied = named_tensors(model)
    return Checkpoint(tuple(meta_of(name, each) for name, each in tensors.items()), tied, frozenset())
