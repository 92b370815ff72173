"""Suggests names if the trainers' names differ from the engines' names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.segment import TensorMeta
from weightsync.plan.wrappers import unwrapped

_ADAPTED = re.compile(r"\.(?:base_layer|original_module|(?:lora_\w+|modules_to_save)\.([^.]+))(?:\.|$)")
"""In the names of a PEFT model, with the adapter's name where there is one."""

_MOST_TRIED = 32


def renamed(missing: TensorMeta, source: Layout, taken: Collection[str]) -> str:
    """Return a renaming that gives trainers' tensors the engines' names, also `missing`; "" if unknown.

    `taken` has the names of all tensors of the engines.
    """
    return _merge(source) or _names(missing, source, taken)


def _merge(source: Layout) -> str:
    found = [match for meta in source.tensors if (match := _ADAPTED.search(meta.name))]
    if not found:
        return ""
    adapters = sorted({match[1] for match in found if match[1]})
    if not adapters:
        return "it is a PEFT model: merge its adapter by merge_and_unload()"
    given = " or ".join(f'merge="{each}"' for each in adapters)
    slots = f'register_adapter(…, adapter="{adapters[0]}") beside a checkpoint if engines have slots'
    return f"it is a PEFT model with an adapter: give TrainerShard {given}, or call {slots}"


def _names(missing: TensorMeta, source: Layout, taken: Collection[str]) -> str:
    shapes = {meta.name: meta.shape for meta in source.tensors}
    known = shapes | {alias: shapes.get(name, ()) for alias, name in source.tied}
    lacking = {*taken}.difference(known)
    others = [name for name, shape in known.items() if name not in taken and shape == missing.shape]
    pairs = dict.fromkeys(_prefixes(missing.name, others))
    for old, new in islice(pairs, _MOST_TRIED):
        made = {new + name.removeprefix(old) for name in known if name.startswith(old)}
        if lacking <= made:
            return f"give TrainerShard names={json.dumps({_as_given(old, source): new})}"
    return ""


def _prefixes(missing: str, others: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield prefixes of `missing` and of other names to exchange, the shortest first."""
    parts = missing.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for name in others:
            if name == end or name.endswith(f".{end}"):
                yield name.removesuffix(end), missing.removesuffix(end)


def _as_given(prefix: str, source: Layout) -> str:
    """Return a prefix as the trainer has it, with the names of wrappers that were taken off."""
    for alias, name in source.tied:
        if name.startswith(prefix) and unwrapped(alias) == name:
            ends = [at + 1 for at, each in enumerate(alias) if each == "."]
            return next((alias[:end] for end in (0, *ends) if unwrapped(alias[:end]) == prefix), prefix)
    return prefix


def left_out(unused: Sequence[str], used: Collection[str]) -> str:
    """Return the value of `exclude` that leaves `unused` tensors out, and none of `used`."""
    patterns = dict.fromkeys(part_of(name, unused, used)[0] for name in unused)
    return f"exclude={json.dumps([*patterns][:4])}"


def part_of(name: str, names: Sequence[str], others: Collection[str]) -> tuple[str, int]:
    """Return a pattern of a tensor's module of which `others` have no name, and how many of `names` fit it.

    The outermost such module counts. Without one that has several tensors, the pattern is the name itself.
    """
    modules = name.split(".")
    for depth in range(1, len(modules)):
        prefix = ".".join((*modules[:depth], ""))
        if not any(other.startswith(prefix) for other in others):
            count = sum(each.startswith(prefix) for each in names)
            return (f"{prefix}*", count) if count > 1 or depth == 1 else (name, 1)
    return name, 1
