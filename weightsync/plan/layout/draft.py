"""What an engine rank says of the draft that it speculates with, and how a draft's tensors are called."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

DRAFT = "draft/"
"""What names of a draft's tensors begin with, at trainers and engines. Its checkpoint's names follow."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft's own tensors in one rank. Those that it shares with the target belong to the target.

    A trained draft's tensors are in the rank's layout, so that only `method` and `model` are given here.

    Attributes:
        method: the engine's name of the way to speculate, such as ``eagle3``.
        model: where the draft's checkpoint is.
        num_tensors, nbytes: its parameters and persistent buffers, and packed weights that can be read.
        num_hidden: modules whose weights kernels hold in memory that nobody can read.
        kind: equal for ranks that hold the same tensors in the same way.
        digest: equal for such ranks if all bytes are.
        trained: whether updates write it.
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
    """Return what a model calls tensor `name` of a draft if it holds it itself, as it may hold MTP layers.

    That is `name` itself if the model has another tensor of that name, which is in `taken`: what engines
    call the tensors that they take.
    """
    own = name.removeprefix(DRAFT)
    return name if own in taken else own
