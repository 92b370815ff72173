"""Names single experts as parts of the stacks of transformers' models.

``experts.3.gate_proj.weight`` [I, H] and ``experts.3.up_proj.weight`` become rows of ``experts.gate_up_proj``
[E, 2I, H], ``experts.3.down_proj.weight`` a part of ``experts.down_proj`` [E, H, I]. Transformers has these
names and shapes from version 5 on, and engines use them. Files with the names w1, w3 and w2, such as
Mixtral's files, have the stacks ``experts.w1_w3`` and ``experts.w2``. Experts without a gate have a stack
``experts.up_proj`` [E, I, H].
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from weightsync.plan.layout.balance import Stretch
from weightsync.plan.layout.segment import Box, RankLayout, Segment, TensorMeta


@dataclass(frozen=True, slots=True)
class _Kind:
    """How files name the matrices of an expert, and the two stacks of them."""

    inner: str
    inner_leaves: tuple[str, ...]
    outer: str

    def leaves(self, stack: str) -> tuple[str, ...]:
        """Return the matrices that follow each other in the rows of `stack`."""
        return self.inner_leaves if stack == self.inner else (self.outer,)


_KINDS = (
    _Kind("gate_up_proj", ("gate_proj", "up_proj"), "down_proj"),
    _Kind("w1_w3", ("w1", "w3"), "w2"),
    _Kind("up_proj", ("up_proj",), "down_proj"),
)
_STACK = re.compile(r"(?P<base>.+\.experts)\.(?P<stack>gate_up_proj|up_proj|down_proj|w1_w3|w2)")
_EXPERT = re.compile(
    r"(?P<base>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj|w[123])\.weight"
)


def expert_parts(
    name: str, shape: Sequence[int], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Box]]:
    """Yield the boxes of a stack of experts, with the names that these have in checkpoints.

    Other tensors, and stacks of other shapes, are yielded whole.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
    """
    found = _STACK.fullmatch(name)
    kind = found and _kind_of_stacks(found["base"], shapes)
    if not found or not kind or found["stack"] not in (kind.inner, kind.outer):
        yield name, Box.whole(shape)
        return
    num_experts, rows, columns = shape
    leaves = kind.leaves(found["stack"])
    rows //= len(leaves)
    for expert in range(num_experts):
        for number, leaf in enumerate(leaves):
            box = Box((expert, number * rows, 0), (1, rows, columns))
            yield f"{found['base']}.{expert}.{leaf}.weight", box


def _kind_of_stacks(base: str, shapes: Mapping[str, tuple[int, ...]]) -> _Kind | None:
    """Return the kind whose stacks are in `shapes`. Transposed stacks are left to the models' own loaders."""
    for kind in _KINDS:
        inner, outer = (shapes.get(f"{base}.{stack}", ()) for stack in (kind.inner, kind.outer))
        if len(outer) == 3 and inner == (outer[0], len(kind.inner_leaves) * outer[2], outer[1]):
            return kind
    return None


def stack_name(part: str, leaves: Sequence[str]) -> str | None:
    """Return the name of the stack whose rows are `leaves` of each expert. None if no stack has them.

    Args:
        part: the name of an expert's first one in files.
    """
    found = _EXPERT.fullmatch(part)
    for kind in _KINDS if found else ():
        for stack in (kind.inner, kind.outer):
            if found and kind.leaves(stack) == tuple(leaves):
                return f"{found['base']}.{stack}"
    return None


def stacked(
    metas: Sequence[TensorMeta], whole: Sequence[Stretch]
) -> tuple[tuple[TensorMeta, ...], tuple[Stretch, ...]]:
    """Stack the experts of each layer that has all of them; other tensors are unchanged.

    `whole[i]` is all of `metas[i]`.
    """
    layers: defaultdict[str, dict[tuple[int, str], int]] = defaultdict(dict)
    for index, meta in enumerate(metas):
        if found := _EXPERT.fullmatch(meta.name):
            layers[found["base"]][int(found["number"]), found["leaf"]] = index
    tensors: list[TensorMeta] = []
    stretches: list[Stretch] = []
    taken: set[int] = set()
    for base, held in layers.items():
        if made := _stack(base, held, metas, whole):
            taken |= set(held.values())
            tensors += made[0]
            stretches += made[1]
    alone = [index for index in range(len(metas)) if index not in taken]
    return ((*(metas[i] for i in alone), *tensors), (*(whole[i] for i in alone), *stretches))


def stack_experts(layout: RankLayout, num_experts: int) -> RankLayout:
    """Stack the experts that one rank holds; other tensors are unchanged.

    Args:
        num_experts: experts of a layer, on all ranks.
    """
    leaves = defaultdict[str, set[str]](set)
    for found in filter(None, (_EXPERT.fullmatch(meta.name) for meta in layout.tensors)):
        leaves[found["base"]].add(found["leaf"])
    kinds = {base: _kind_of_leaves(each) for base, each in leaves.items()}
    places = {meta.name: _place(meta, num_experts, kinds) for meta in layout.tensors}
    metas = {place[0].name: place[0] for place in places.values()}
    return replace(
        layout,
        tensors=tuple(metas.values()),
        segments=tuple(_moved(segment, *places[segment.tensor]) for segment in layout.segments),
        frozen=_all_frozen(layout, places),
    )


def _all_frozen(layout: RankLayout, places: Mapping[str, tuple[TensorMeta, object]]) -> tuple[str, ...]:
    """Return the names of tensors of which every part is frozen."""
    changing = {places[meta.name][0].name for meta in layout.tensors if meta.name not in layout.frozen}
    return tuple(
        dict.fromkeys(places[name][0].name for name in layout.frozen if places[name][0].name not in changing)
    )


def _kind_of_leaves(leaves: Collection[str]) -> _Kind | None:
    """Return the kind of experts that have these matrices, or more. None if none has."""
    whole = (kind for kind in _KINDS if {*kind.inner_leaves, kind.outer} == {*leaves})
    some = (kind for kind in _KINDS if {*kind.inner_leaves, kind.outer} >= {*leaves})
    return next(chain(whole, some), None)


def _place(
    meta: TensorMeta, num_experts: int, kinds: Mapping[str, _Kind | None]
) -> tuple[TensorMeta, tuple[int, ...]]:
    """Return the tensor that `meta` is a part of, and where it starts there; itself if it is no expert."""
    found = _EXPERT.fullmatch(meta.name)
    kind = found and kinds[found["base"]]
    if not found or not kind:
        return meta, ()
    rows, columns = meta.shape
    stack = kind.outer if found["leaf"] == kind.outer else kind.inner
    leaves = kind.leaves(stack)
    whole = TensorMeta(f"{found['base']}.{stack}", meta.dtype, (num_experts, len(leaves) * rows, columns))
    return whole, (int(found["number"]), leaves.index(found["leaf"]) * rows)


def _moved(segment: Segment, meta: TensorMeta, start: tuple[int, ...]) -> Segment:
    if not start:
        return segment
    (number, first_row), (row, column) = start, segment.box.offset
    box = Box((number, first_row + row, column), (1, *segment.box.extent))
    strides = (max(segment.strides) * max(segment.box.extent), *segment.strides)
    return replace(segment, tensor=meta.name, box=box, strides=strides)


def _stack(
    base: str, held: dict[tuple[int, str], int], metas: Sequence[TensorMeta], whole: Sequence[Stretch]
) -> tuple[list[TensorMeta], list[Stretch]] | None:
    """Stack one layer's experts. Returns None if some are missing or differ in dtype or shape."""
    num_experts = 1 + max(number for number, _ in held)
    kind = _kind_of_leaves({leaf for _, leaf in held})
    if kind is None:
        return None
    leaves = (*kind.inner_leaves, kind.outer)
    forms = {
        leaf: {(metas[i].dtype, metas[i].shape) for (_, each), i in held.items() if each == leaf}
        for leaf in leaves
    }
    if len(held) != len(leaves) * num_experts or any(len(form) != 1 for form in forms.values()):
        return None
    ((dtype, (rows, columns)),) = forms[kind.inner_leaves[0]]
    if any(forms[leaf] != {(dtype, (rows, columns))} for leaf in kind.inner_leaves):
        return None
    if forms[kind.outer] != {(dtype, (columns, rows))}:
        return None
    stacks, stretches = {}, []
    for index in held.values():
        stack, (number, row) = _place(metas[index], num_experts, {base: kind})
        stacks[stack.name] = stack
        box = Box((number, row, 0), (1, *metas[index].shape))
        stretches.append(replace(whole[index], tensor=stack.name, box=box))
    return [*stacks.values()], stretches
