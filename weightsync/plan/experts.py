"""Names single experts as parts of the stacks of transformers' models.

``experts.3.gate_proj.weight`` [I, H] and ``experts.3.up_proj.weight`` become rows of ``experts.gate_up_proj``
[E, 2I, H], ``experts.3.down_proj.weight`` a part of ``experts.down_proj`` [E, H, I]. These names and shapes
are those of transformers from version 5 on, which engines use.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.balance import Stretch

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
_EXPERT = re.compile(r"(?P<base>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>gate|up|down)_proj\.weight")


def expert_parts(
    name: str, shape: Sequence[int], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Box]]:
    """Yield the boxes of a stack of experts, with the names that these have in checkpoints.

    Other tensors, and stacks of other shapes, are yielded whole.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
    """
    base = name.removesuffix(_GATE_UP).removesuffix(_DOWN)
    if base == name or not _is_stack(shapes.get(base + _GATE_UP, ()), shapes.get(base + _DOWN, ())):
        yield name, Box.whole(shape)
        return
    num_experts, rows, columns = shape
    leaves = ("down_proj",) if name.endswith(_DOWN) else ("gate_proj", "up_proj")
    rows //= len(leaves)
    for expert in range(num_experts):
        for number, leaf in enumerate(leaves):
            box = Box((expert, number * rows, 0), (1, rows, columns))
            yield f"{base}.experts.{expert}.{leaf}.weight", box


def _is_stack(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether shapes are those of a stack. Transposed stacks are left to the models' own loaders."""
    return len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])


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
    return (
        (*(metas[i] for i in alone), *tensors),
        (*(whole[i] for i in alone), *stretches),
    )


def stack_experts(layout: RankLayout, num_experts: int) -> RankLayout:
    """Stack the experts that one rank holds; other tensors are unchanged.

    Args:
        num_experts: experts of a layer, on all ranks.
    """
    places = {meta.name: _place(meta, num_experts) for meta in layout.tensors}
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


def _place(meta: TensorMeta, num_experts: int) -> tuple[TensorMeta, tuple[int, ...]]:
    """Return the tensor that `meta` is a part of, and where it starts there; itself if it is no expert."""
    found = _EXPERT.fullmatch(meta.name)
    if not found:
        return meta, ()
    rows, columns = meta.shape
    number, leaf = int(found["number"]), found["leaf"]
    if leaf == "down":
        return TensorMeta(f"{found['base']}.down_proj", meta.dtype, (num_experts, rows, columns)), (number, 0)
    stack = TensorMeta(f"{found['base']}.gate_up_proj", meta.dtype, (num_experts, 2 * rows, columns))
    return stack, (number, rows if leaf == "up" else 0)


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
    kinds = {
        leaf: {(metas[i].dtype, metas[i].shape) for (_, each), i in held.items() if each == leaf}
        for leaf in ("gate", "up", "down")
    }
    if len(held) != 3 * num_experts or any(len(kind) != 1 for kind in kinds.values()):
        return None
    ((dtype, (inner, outer)),) = kinds["gate"]
    if kinds["up"] != kinds["gate"] or kinds["down"] != {(dtype, (outer, inner))}:
        return None
    gate_up = TensorMeta(f"{base}.gate_up_proj", dtype, (num_experts, 2 * inner, outer))
    down = TensorMeta(f"{base}.down_proj", dtype, (num_experts, outer, inner))
    stretches = []
    for (number, leaf), index in held.items():
        into, row = (down, 0) if leaf == "down" else (gate_up, inner if leaf == "up" else 0)
        box = Box((number, row, 0), (1, *metas[index].shape))
        stretches.append(replace(whole[index], tensor=into.name, box=box))
    return [gate_up, down], stretches
