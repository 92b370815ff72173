"""Names of transformers' tensors in files, which engines' loaders use.

From version 5 on, transformers renames tensors and stacks experts when it loads files, and undoes both when
it saves files (``transformers.conversion_mapping``).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from weightsync.plan import RankLayout
from weightsync.plan.layout.experts import stack_name

_STACKS: Mapping[tuple[tuple[str, int | None], ...], int] = {
    (("SplitModulelist", 0),): 1,
    (("Chunk", 1), ("SplitModulelist", 0)): 2,
}
"""Operations and dimensions by which experts leave a stack: the number of matrices per expert."""
MODELS = "transformers.modeling_utils"
"""The module of transformers' models. If it is not imported, all tensors keep their names."""
_PREFIX = "PrefixChange"
"""Adds or removes the name of a part of another model, which this model's class does not know."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """Names in files of a model's tensors.

    Attributes:
        names: names that differ, by the model's own names. `stack_name` names stacks of experts.
        computed: tensors that files store in another form, with the names there.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, names: Iterable[str]) -> FileNames:
        """Return names in files. `names` may lack the path of the model in `module`."""
        given = sorted(names)  # transformers sorts them, too
        models = [*_pretrained(module)]
        if not any(name.startswith(prefix) for name in given for prefix, _ in models):
            models = [("", model) for _, model in models[:1]]
        found: dict[str, str] = {}
        computed: dict[str, str] = {}
        for prefix, model in models:
            converters, renamings = _to_files(model)
            for name in (each for each in given if each.startswith(prefix) and (converters or renamings)):
                own = name.removeprefix(prefix)
                new, stored = _in_files(own, converters, renamings)
                if new != own:
                    found[name] = prefix + new
                if stored:
                    computed[name] = prefix + stored
        return cls(found, computed)

    def name(self, name: str) -> str:
        """Return the name in files of one of the model's tensors."""
        return self.names.get(name, name)


class FileRenaming:
    """Renames layouts of a model as `FileNames`, which it finds once for each class of models."""

    def __init__(self) -> None:
        self._found: tuple[object, Mapping[str, str]] = None, {}

    def renamed(self, model: object, layout: RankLayout) -> RankLayout:
        """Return `layout` with names in files. Names stay if `model` is not a module."""
        given = frozenset(chain((meta.name for meta in layout.tensors), (alias for alias, _ in layout.tied)))
        key = type(model), given
        if isinstance(model, nn.Module) and self._found[0] != key:
            self._found = key, FileNames.of(model, given).names
        return layout.renamed(self._found[1]) if self._found[1] else layout


def _in_files(name: str, converters: Sequence[Any], renamings: Sequence[Any]) -> tuple[str, str]:
    """Return a tensor's name in files, and the name of another form in files, if any."""
    for converter in converters:
        part, matched = converter.rename_source_key(name)
        if matched is not None:
            stored = _renamed(part, renamings)
            stack = stack_name(stored.replace(".*.", ".0."), _leaves(converter))
            return (stack, "") if stack else (_renamed(name, renamings), stored)
    return _renamed(name, renamings), ""


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def _leaves(converter: Any) -> Sequence[str]:  # noqa: ANN401 - transformers'
    """Return the matrices of an expert in a stack, in the order of rows; () for other converters."""
    operations = tuple((type(each).__name__, getattr(each, "dim", None)) for each in converter.operations)
    if len(converter.target_patterns) != _STACKS.get(operations):
        return ()
    return [pattern.split(".")[-2] for pattern in converter.target_patterns if pattern.count(".") > 1]


def _to_files(model: Any) -> tuple[Sequence[Any], Sequence[Any]]:  # noqa: ANN401 - transformers'
    """Return transformers' conversions from a model to files: conversions of the form, and of only names."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = get_model_conversion_mapping(_as_declared(model), add_legacy=False)
    back = [each.reverse_transform() for each in reversed(found) if type(each).__name__ != _PREFIX]
    converters = [each for each in back if hasattr(each, "operations")]
    return converters, [each for each in back if not hasattr(each, "operations")]


def _as_declared(model: Any) -> Any:  # noqa: ANN401 - transformers'
    """Return a model of the same configuration, of classes that transformers finds by name.

    FSDP replaces the class of a module that it wraps.
    """
    if all(_is_declared(type(each)) for _, each in _pretrained(model, nested=True)):
        return model
    # FSDP's own class comes first, and is declared, too.
    declared = next(each for each in type(model).__mro__ if issubclass(each, _kind()) and _is_declared(each))
    with torch.device("meta"):
        return declared(copy.deepcopy(model.config))


def _is_declared(kind: type) -> bool:
    return vars(sys.modules[kind.__module__]).get(kind.__name__) is kind


def _pretrained(module: nn.Module, *, nested: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield transformers' models in `module`, with the prefixes of their tensors' names.

    With `nested`, also models that are parts of other models.
    """
    kind = _kind()
    outer: list[str] = []
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(each, kind) and (nested or not prefix.startswith(tuple(outer))):
            outer.append(prefix)
            yield prefix, each


def _kind() -> Any:  # noqa: ANN401 - transformers' class
    """Return the base class of transformers' models, () if transformers is not imported."""
    return getattr(sys.modules.get(MODELS), "PreTrainedModel", ())
