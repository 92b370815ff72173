"""Pairs the tensors of both sides by name and puts them in travel order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.coverage import check_tiling, first_element
from weightsync.plan.layout.draft import DRAFT, in_model
from weightsync.plan.layout.layout import Int64, Layout
from weightsync.plan.layout.renames import left_out, part_of, renamed
from weightsync.plan.layout.segment import CASTABLE, TensorMeta, suggest
from weightsync.plan.wrappers import unwrapped


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Paired tensors: `tensors` in travel order; tensor t is sent from the source's `source[t]`.

    A tensor travels in the dtype that all engines hold. If they differ, it travels in the source's, and an
    engine that holds another casts it.
    """

    tensors: tuple[TensorMeta, ...]
    source: Int64
    tied: tuple[tuple[str, str], ...]

    def frozen(self, source: Layout) -> tuple[int, ...]:
        """Return the numbers of the tensors that `source`, the paired layout, says are frozen."""
        names = source.frozen
        return tuple(t for t, number in enumerate(self.source.tolist()) if source.names[number] in names)


def match(source: Layout, engines: Sequence[tuple[str, Layout]]) -> Match:
    """Pair each tensor of the engines with the source's.

    Raises:
        PlanError: names, shapes, dtypes or ties of the two sides do not fit.
    """
    first_name, first = engines[0]
    others = [
        _Other(name, {meta.name: meta for meta in engine.tensors})
        for name, engine in engines[1:]
        if not _check_same(first_name, first, name, engine)
    ]
    index = {meta.name: number for number, meta in enumerate(source.tensors)}
    taken = {*first.names, *dict(first.tied)}
    _check_ties(source, index, engines, taken)
    aliases = _in_model(index, taken) | {
        alias: index[canonical]
        for alias, canonical in source.tied
        if canonical not in taken or unwrapped(alias) != canonical  # one tensor of theirs is not two of ours
    }
    wanted = [first.tensors[number] for number in _travel_order(first)]
    held = aliases | index
    if missing := [meta for meta in wanted if meta.name not in held]:
        raise _missing(missing, source, held, taken)
    pairs = np.array([held[meta.name] for meta in wanted], np.int64)
    _check_used(source, pairs, wanted)
    for meta, number in zip(wanted, pairs.tolist(), strict=True):
        _check_pair(source.tensors[number], meta)
    travel = [
        _travelling(first_name, meta, others, source.tensors[number])
        for meta, number in zip(wanted, pairs.tolist(), strict=True)
    ]
    tied = sorted({pair for _, engine in engines for pair in engine.tied})
    return Match(tuple(travel), pairs, tuple(tied))


@dataclass(frozen=True, slots=True)
class _Other:
    """An engine that holds tensors in other dtypes than the first engine."""

    name: str
    tensors: dict[str, TensorMeta]


def _travelling(first: str, meta: TensorMeta, others: Sequence[_Other], ours: TensorMeta) -> TensorMeta:
    """Return a tensor of the first engine as it travels: in the source's dtype if engines differ."""
    for other in others:
        held = other.tensors[meta.name]
        if held.dtype != meta.dtype:
            if not {meta.dtype, held.dtype, ours.dtype} <= CASTABLE:
                raise PlanError(
                    meta.name,
                    f"engine {first} holds it as {meta.dtype}, engine {other.name} as {held.dtype}; "
                    f"only {', '.join(sorted(CASTABLE))} are cast to one another: start both with one "
                    "dtype, or give them to two WeightSyncs (add_model makes the second)",
                )
            return replace(meta, dtype=ours.dtype)
    return meta


def _in_model(index: Mapping[str, int], taken: Collection[str]) -> dict[str, int]:
    """Return a draft's tensors in the source's model, by their names in the plan."""
    found = ((name, in_model(name, taken)) for name in taken if name.startswith(DRAFT))
    return {name: index[own] for name, own in found if own != name and own in index}


def _travel_order(engine: Layout) -> list[int]:
    """Order tensors by first appearance in the segments; tensors without segments follow."""
    seen, first = np.unique(engine.tensor, return_index=True)
    rest = np.setdiff1d(np.arange(len(engine.tensors)), seen)
    order: list[int] = np.concatenate([seen[np.argsort(first)], rest]).tolist()
    return order


_NO_DRAFT = (
    "register trainers that hold it (as self.draft, or a checkpoint with draft=; MTP layers may be in the "
    "model), or freeze it with "
    'SyncConfig(components={"draft": "frozen"})'
)


def _missing(
    missing: Sequence[TensorMeta], source: Layout, held: Collection[str], taken: Collection[str]
) -> PlanError:
    """Return the error of tensors that only engines have. `held` has the source's names, `taken` engines'."""
    names = [meta.name for meta in missing]
    name = names[0]
    if name.startswith(DRAFT) and not any(each.startswith(DRAFT) for each in held):
        return PlanError(name, f"engines have a trained draft, no trainer or checkpoint has one; {_NO_DRAFT}")
    hint = renamed(missing[0], source, taken)
    problem = f"the engine needs it, no trainer or checkpoint declares it; {hint or suggest(name, held)}"
    pattern, count = part_of(name, names, held)
    if count > 1 and not hint:
        problem += (
            f". If nobody trains {pattern} ({count} tensors), register one more trainer that reads them from "
            'the checkpoint, with frozen=["*"]'
        )
    return PlanError(name, problem)


def _check_used(source: Layout, pairs: Int64, wanted: Sequence[TensorMeta]) -> None:
    unused = np.setdiff1d(np.arange(len(source.tensors)), pairs)
    if len(unused):
        names = [source.tensors[number].name for number in unused.tolist()]
        name, used = names[0], [meta.name for meta in wanted]
        if name.startswith(DRAFT) and not any(meta.name.startswith(DRAFT) for meta in wanted):
            remedy = 'SyncConfig(components={"draft": "trained"}) has engines that speculate take it'
            raise PlanError(name, f"a trainer or checkpoint holds a draft, but no engine takes one; {remedy}")
        remedy = f"leave it out by {left_out(names, used)}, or rename it: {suggest(name, used)}"
        raise PlanError(name, f"a trainer or checkpoint declares it, but no engine has it; {remedy}")


def _check_pair(ours: TensorMeta, theirs: TensorMeta) -> None:
    if ours.shape != theirs.shape:
        has_other_rows = ours.shape[1:] == theirs.shape[1:] != ()
        hint = (
            "; if the vocabulary was resized or padded, start engines from a folder whose configuration has "
            "the trainer's vocab_size; of Megatron-Core, give the source the checkpoint's"
        )
        raise PlanError(
            theirs.name,
            f"shape {ours.shape} at the source, {theirs.shape} at the engine; "
            f"both must declare the global shape of the checkpoint{hint if has_other_rows else ''}",
        )
    if ours.dtype != theirs.dtype and not {ours.dtype, theirs.dtype} <= CASTABLE:
        raise PlanError(
            theirs.name,
            f"dtype {ours.dtype} at the source, {theirs.dtype} at the engine; {_remedy(ours, theirs)}",
        )


def _remedy(ours: TensorMeta, theirs: TensorMeta) -> str:
    if ours.dtype.startswith("float8") or theirs.dtype.startswith("float8"):
        return (
            "a float8 is not cast, since its values need a scale: serve the engine in the source's dtype, "
            "or have the source hold float8 values and their scales, as the engine names them"
        )
    return f"only {', '.join(sorted(CASTABLE))} are cast to one another: declare the same on both sides"


def _check_ties(
    source: Layout, index: dict[str, int], engines: Sequence[tuple[str, Layout]], taken: Collection[str]
) -> None:
    """Check that tensors which an engine ties are not two tensors at the trainers."""
    aliases = dict(source.tied)
    for engine, layout in engines:
        for alias, canonical in layout.tied:
            held = alias if alias in index else in_model(alias, taken)
            ours = {aliases.get(name, name) for name in (held, canonical)}
            if len(ours & index.keys()) > 1 and alias.startswith(DRAFT):
                raise PlanError(
                    held,
                    f"the draft of engine {engine} has no memory of its own for it: it uses the model's "
                    f"{canonical}. Leave it out where trainers or files hold it, by exclude={[held]}",
                )
            if len(ours & index.keys()) > 1:
                raise PlanError(
                    alias,
                    f"engine {engine} ties it to {canonical}, the trainers hold two different tensors; "
                    "tie them in the trainer's model, leave the former out by "
                    f"exclude={[alias]} if they are equal, or build the engine without tied weights",
                )


def _check_same(first_name: str, first: Layout, name: str, engine: Layout) -> bool:
    """Check that engines take the same tensors. Each tensor is sent once to all engines.

    Returns True if the engines also have the tensors in the same dtypes.
    """
    if engine.names == first.names and engine.tensors == first.tensors:
        return True
    are_same = True
    metas = {meta.name: meta for meta in first.tensors}
    for meta in engine.tensors:
        known = metas.pop(meta.name, None)
        if known is None:
            hint = _hint(meta.name, first)
            raise PlanError(meta.name, f"engine {name} needs it, engine {first_name} does not; {hint}")
        if known.shape != meta.shape:
            raise PlanError(
                meta.name,
                f"engine {first_name} says {known.dtype} {known.shape}, engine {name} says "
                f"{meta.dtype} {meta.shape}; all engines must serve the same model",
            )
        are_same = are_same and known.dtype == meta.dtype
    for left in metas:
        hint = _hint(left, engine)
        raise PlanError(left, f"engine {first_name} needs it, engine {name} does not; {hint}")
    return are_same


def _hint(name: str, other: Layout) -> str:
    """Suggest a remedy for a tensor that another engine does not have."""
    if name.startswith(DRAFT) and not any(each.startswith(DRAFT) for each in other.names):
        return "have all engines of a WeightSync speculate with a trained draft, or none"
    return suggest(name, other.names)


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """g boxes that are proven to tile every tensor.

    They are ordered by sent tensor, then by first element.

    Attributes:
        tensor: int64[g], the sent tensor of each box.
        rows: int64[m], rows of the source's layout: the replicas of box 0 by rank, those of box 1, ...
        start, size: int64[g], the start of a box's replicas in `rows`, and their number.
    """

    tensor: Int64
    rows: Int64
    start: Int64
    size: Int64

    @classmethod
    def of(cls, source: Layout, matched: Match) -> Shards:
        """Group the source's segments, without empty ones.

        Raises:
            PlanError: names a tensor whose boxes leave a hole, overlap, or are declared twice by a rank.
        """
        rows, tensor = _source_rows(source, matched)
        offset, extent = source.offset[rows], source.extent[rows]
        same = np.zeros(len(rows), np.bool_)
        same[1:] = (
            (tensor[1:] == tensor[:-1])
            & (offset[1:] == offset[:-1]).all(axis=1)
            & (extent[1:] == extent[:-1]).all(axis=1)
        )
        _check_twice(matched, same, tensor, source.rank[rows].astype(np.int64))
        start = np.flatnonzero(~same)
        shape = source.shape[matched.source]
        rank = source.rank[rows[start]].astype(np.int64)
        check_tiling(matched.tensors, shape, tensor[start], offset[start], extent[start], rank)
        return cls(tensor[start], rows, start, np.diff(np.append(start, len(rows))))

    def of_tensors(self, tensors: Int64) -> Shards:
        """Return the boxes of some of the tensors."""
        kept = np.isin(self.tensor, tensors)
        size = self.size[kept]
        rows = self.rows[np.repeat(kept, self.size)]
        return Shards(self.tensor[kept], rows, np.cumsum(size) - size, size)

    @property
    def are_alone(self) -> bool:
        """Return True if each box is held by one rank."""
        return bool((self.size == 1).all())

    @property
    def first(self) -> Int64:
        """One row of the source's layout for each box, int64[g]."""
        return self.rows[self.start]


def _source_rows(source: Layout, matched: Match) -> tuple[Int64, Int64]:
    """Return rows of the source's nonempty segments, and the tensor each becomes.

    Ordered by tensor that travels, then by first element, then by rank.
    """
    held: Int64 = np.flatnonzero((source.extent > 0).all(axis=1))
    numel = source.shape.prod(axis=1)
    base = np.cumsum(numel) - numel
    owner = source.tensor[held]
    key = base[owner] + first_element(source.offset[held], source.shape[owner])
    held = held[np.argsort(key, kind="stable")]
    counts = np.bincount(source.tensor[held], minlength=len(source.tensors))
    first = (np.cumsum(counts) - counts)[matched.source]
    tensor, nth = repeated(counts[matched.source])
    return held[first[tensor] + nth], tensor


def _check_twice(matched: Match, same: npt.NDArray[np.bool_], tensor: Int64, rank: Int64) -> None:
    twice = np.flatnonzero(same[1:] & (rank[1:] == rank[:-1]))
    if len(twice):
        row = int(twice[0])
        raise PlanError(
            matched.tensors[int(tensor[row])].name,
            f"trainer rank {int(rank[row])} declares one box of it twice; declare each box once",
        )
