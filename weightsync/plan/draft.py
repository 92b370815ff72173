"""What an engine rank says of the draft model that it speculates with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft's own tensors in one rank. Those that it shares with the target belong to the target.

    Attributes:
        method: the engine's name of the way to speculate, such as ``eagle3``.
        model: where the draft's checkpoint is.
        num_tensors, nbytes: its parameters and persistent buffers, and packed weights that can be read.
        num_hidden: modules whose weights kernels hold in memory that nobody can read.
        kind: equal for ranks that hold the same tensors in the same way.
        digest: equal for such ranks if all bytes are.
    """

    method: str
    model: str
    num_tensors: int
    nbytes: int
    num_hidden: int
    kind: str
    digest: str
