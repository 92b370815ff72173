"""An engine rank's description of its draft, and the names of a draft's tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

DRAFT = "draft/"
"""The prefix of a draft's tensors, at trainers and engines. The names in the draft's checkpoint follow."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft's own tensors in one rank. Tensors that it shares with the target belong to the target.

    A trained draft's tensors are in the rank's layout, so only `method` and `model` are given here.

    Attributes:
        method: the engine's name of the way to speculate, such as ``eagle3``.
        model: the place of the draft's checkpoint.
        num_tensors, nbytes: the draft's parameters and persistent buffers, and packed weights that can be
            read.
        num_hidden: modules whose weights kernels hold in memory that nobody can read.
        kind: equal for ranks that hold the same tensors in the same way.
        digest: equal for such ranks if all bytes are.
        trained: whether updates write the draft.
    """

    method: str
    model: str
    num_tensors: int = 0
    nbytes: int = 0
    num_hidden: int = 0
    kind: str = ""
    digest: str = ""
    trained: bool = False


def in_model(name: str, taken: Collection[str]) -> str:
    """Return a model's name for tensor `name` of a draft in the model, as MTP layers may be.

    The model's name has no prefix. If that name is in `taken`, the names of the engines' tensors, another
    tensor of the model has it, and `name` is returned.
    """
    own = name.removeprefix(DRAFT)
    return name if own in taken else own
