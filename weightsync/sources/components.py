"""Joins a rank's model and the draft that engines speculate with: both have one version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.plan import RankLayout
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.segment import Cut, MeshPlace
from weightsync.sources.base import Models
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.selection import Names, Selection
from weightsync.sources.tensors import Guard, TensorSource


class ComponentsSource(TensorSource):
    """Joins the sources of a model and a draft. Names of the draft's tensors begin with `DRAFT`.

    If the draft uses a tensor of the model, such as the embedding, the draft's tensor is declared as tied.
    """

    def __init__(
        self,
        models: Models,
        make: Callable[..., Any],
        exclude: Collection[str] = (),
        *,
        names: Names | None = None,
        frozen: Collection[str] = (),
        offloads: bool = False,
        hf_config: Any = None,  # noqa: ANN401 - transformers'
        **of_model: object,
    ) -> None:
        """`make` is `make_source`. Other arguments are those of `TrainerShard`.

        Entries of `exclude`, `frozen` and a mapping `names` that begin with `DRAFT` are for the draft. If
        `names` is a function, it gets names of both. `of_model` is only for the model.
        """
        super().__init__(models, offloads=offloads)
        model, draft = models
        self._of_draft = Selection(_for_draft(exclude), _of_prefix(names, True), _for_draft(frozen))
        self._model: TensorSource | None = None
        if model is not None:
            of_model |= {"names": _of_prefix(names, False), "frozen": _for_model(frozen)}
            self._model = make(model, _for_model(exclude), hf_config=hf_config, **of_model)
        self._draft: TensorSource | None = None if draft is None else make(draft)

    def replace(self, model: Models) -> None:
        """Use the weights of these models from now on, see `TensorSource.replace`."""
        super().replace(model)
        for part, each in zip((self._model, self._draft), model, strict=True):
            if part and part.model is not each:
                part.replace(each)

    def describe(self) -> LocalWeights:
        """Return this rank's weights. Each component has checked and applied its settings."""
        return self._weights()

    def _selected(self, weights: LocalWeights) -> LocalWeights:
        return weights

    def _weights(self) -> LocalWeights:
        model = self._model.describe() if self._model else LocalWeights(RankLayout((), ()), {})
        if self._draft is None:
            return model
        draft = self._named(self._draft.describe())
        tensors = {**model.tensors, **draft.tensors}
        return LocalWeights(_join(model, draft), tensors, computed=model.computed)

    def _named(self, weights: LocalWeights) -> LocalWeights:
        """Return a draft's weights with names of the plan."""
        layout = _with_prefix(weights.layout)
        unmatched = self._of_draft.check(layout)
        layout = self._of_draft.of(layout)
        for meta in layout.tensors:
            if not meta.name.startswith(DRAFT):
                raise ConfigError("names", meta.name, f"it is of the draft: have it begin with {DRAFT}")
        if layout.stage:
            stage = replace(layout.stage, unmatched=layout.stage.unmatched + unmatched)
            layout = replace(layout, stage=stage)
        return LocalWeights(layout, {DRAFT + name: each for name, each in weights.tensors.items()})

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        model = self._model._tensors() if self._model else {}
        draft = self._draft._tensors() if self._draft else {}
        return {**model, **{DRAFT + name: each for name, each in draft.items()}}

    def _finish(self) -> None:
        for part in self._parts():
            part._complete()

    def _watch(self, weights: LocalWeights) -> _GuardOfBoth:
        model, draft = _apart(weights.tensors)
        held = replace(weights, tensors=model), replace(weights, tensors=draft)
        pairs = zip((self._model, self._draft), held, strict=True)
        return _GuardOfBoth([part._watch(each) if part else None for part, each in pairs])

    def _parts(self) -> Iterable[TensorSource]:
        return (part for part in (self._model, self._draft) if part)


class _GuardOfBoth:
    """The guards of model and draft, see `Guard`."""

    def __init__(self, guards: Sequence[Guard | None]) -> None:
        self._guards = tuple(guards)
        self.strays = frozenset(
            prefix + name
            for prefix, guard in zip(("", DRAFT), self._guards, strict=True)
            for name in (guard.strays if guard else ())
        )

    def as_before(self, models: Models) -> bool:
        pairs = zip(self._guards, models, strict=True)
        return all(guard.as_before(model) if guard else model is None for guard, model in pairs)

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        moved = []
        for prefix, guard, held in zip(("", DRAFT), self._guards, _apart(tensors), strict=True):
            moved += [prefix + name for name in guard.moved(held)] if guard else []
        return moved


def _apart(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split tensors into the model's and the draft's, without the prefix."""
    model = {name: each for name, each in tensors.items() if not name.startswith(DRAFT)}
    draft = {name.removeprefix(DRAFT): each for name, each in tensors.items() if name.startswith(DRAFT)}
    return model, draft


def _for_draft(patterns: Collection[str]) -> list[str]:
    return [each for each in patterns if each.startswith(DRAFT)]


def _for_model(patterns: Collection[str]) -> list[str]:
    return [each for each in patterns if not each.startswith(DRAFT)]


def _of_prefix(names: Names | None, of_draft: bool) -> Names | None:
    if not isinstance(names, Mapping):
        return names
    return {old: new for old, new in names.items() if old.startswith(DRAFT) is of_draft} or None


def _with_prefix(layout: RankLayout) -> RankLayout:
    mesh, stage = layout.mesh, layout.stage
    given = (*(meta.name for meta in layout.tensors), *(alias for alias, _ in layout.tied))
    named = layout.renamed({name: DRAFT + name for name in (*given, *(stage.shared if stage else ()))})
    return replace(
        named,
        segments=tuple(replace(each, buffer=DRAFT + each.buffer) for each in named.segments),
        mesh=mesh and replace(mesh, cuts={DRAFT + name: cut for name, cut in mesh.cuts.items()}),
    )


def _join(model: LocalWeights, draft: LocalWeights) -> RankLayout:
    ours, theirs = model.layout, draft.layout
    tied = _shared(model, draft)
    stage = ours.stage
    if stage:  # ranks of all stages may hold the draft
        shared = (*stage.shared, *(meta.name for meta in theirs.tensors))
        stage = replace(stage, shared=shared)
    return RankLayout(
        (*ours.tensors, *(meta for meta in theirs.tensors if meta.name not in tied)),
        (*ours.segments, *(each for each in theirs.segments if each.tensor not in tied)),
        (*ours.tied, *tied.items(), *((alias, tied.get(name, name)) for alias, name in theirs.tied)),
        stage=stage or theirs.stage,
        frozen=(*ours.frozen, *(name for name in theirs.frozen if name not in tied)),
        mesh=_join_meshes(ours, theirs),
    )


def _shared(model: LocalWeights, draft: LocalWeights) -> dict[str, str]:
    """Return names of the draft's tensors that are the model's: the same objects, of the same form."""
    buffers = {**model.tensors, **model.computed}
    owners = {id(buffers[each.buffer]): each for each in model.layout.segments}
    metas = {meta.name: meta for meta in (*model.layout.tensors, *draft.layout.tensors)}
    found = {}
    for segment in draft.layout.segments:
        owner = owners.get(id(draft.tensors[segment.buffer]))
        same = owner and owner.box == segment.box and owner.strides == segment.strides
        if owner and same and metas[owner.tensor].shape == metas[segment.tensor].shape:
            found[segment.tensor] = owner.tensor
    return found


def _join_meshes(model: RankLayout, draft: RankLayout) -> MeshPlace | None:
    """Return the rank's place in the model's meshes, followed by the draft's. Others are of one rank."""
    sizes: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()
    cuts: dict[str, Cut] = {}
    for layout in (model, draft):
        cuts |= {segment.buffer: () for segment in layout.segments}
        if layout.mesh:
            first = len(sizes)
            cuts |= {
                name: tuple((first + axis, dim) for axis, dim in cut)
                for name, cut in layout.mesh.cuts.items()
            }
            sizes, coordinates = sizes + layout.mesh.sizes, coordinates + layout.mesh.coordinates
    return MeshPlace(sizes, coordinates, cuts) if sizes else None
