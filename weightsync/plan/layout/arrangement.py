"""Which slots of an engine's ranks hold which experts, if the engine moves experts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from weightsync.errors import ConfigError

Experts: TypeAlias = Sequence[Sequence[int]]
"""The expert in each slot of all ranks of an engine, by layer. An expert may have several copies."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The experts that a rank's layout follows.

    Attributes:
        key: the `arrangement_key` of the experts of all ranks.
        copies: for each segment of the layout, the number of the expert's copy, and how many copies the
            engine has. Empty if the engine has one copy of each expert.
    """

    key: str
    copies: tuple[tuple[int, int], ...] = ()


def check_experts(engine: str, wanted: Experts, now: Experts) -> None:
    """Raise ConfigError if an engine whose slots are as `now` cannot hold the experts `wanted`."""
    if not now:
        remedy = "leave the engine out: it does not move experts. vLLM does with enable_eplb"
        raise ConfigError("experts", engine, remedy)
    if len(wanted) != len(now):
        raise ConfigError(
            "experts", len(wanted), f"engine {engine} has {len(now)} layers of experts: give each"
        )
    for layer, (row, held) in enumerate(zip(wanted, now, strict=True)):
        field = f"experts.{engine}[{layer}]"
        if len(row) != len(held):
            raise ConfigError(field, len(row), f"give the experts of all {len(held)} slots")
        if other := {*row} - {*held}:
            raise ConfigError(field, min(other), f"give experts from 0 to {max(held)}")
        if missing := {*held} - {*row}:
            raise ConfigError(field, [*row], f"give each expert a slot: {min(missing)} has none")


def arrangement_key(experts: Experts) -> str:
    """Return a key that is equal for equal experts. Without experts it is empty."""
    rows = [[*row] for row in experts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32] if rows else ""
