"""Parses the parallelism of trainers and engines from the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weightsync.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Fsdp:
    """FSDP: each tensor is cut by rows over `shards` ranks, with `replicas` copies (HSDP)."""

    shards: int
    replicas: int = 1

    @property
    def num_ranks(self) -> int:
        return self.shards * self.replicas


@dataclass(frozen=True, slots=True)
class Zero:
    """DeepSpeed ZeRO-3: each rank has an equal run of every tensor's flattened elements."""

    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOrder:
    """Ranks in Megatron's order: tensor parallel innermost, then data parallel, then pipeline stages.

    Whole experts are assigned to `ep` of the tp x dp ranks of a stage and repeated over the others. With an
    `ep` of 1, each is cut over `tp` ranks like a dense MLP.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if self.tp * self.dp % self.ep:
            raise ConfigError("--trainers ep", self.ep, f"give a divisor of tp x dp, {self.tp * self.dp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParallel:
    """One engine of `dp` x `tp` ranks: `dp` copies of dense tensors, cut over `tp`.

    Experts are assigned to `ep` groups of ranks and cut over the ranks of each. vLLM does this with an `ep`
    of 1 (experts cut over all ranks) or dp x tp (whole experts).
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks % self.ep:
            raise ConfigError("--engine ep", self.ep, f"give a divisor of tp x dp, {self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp


TrainerParallel = Fsdp | MegatronOrder | Zero


def parse_trainers(text: str) -> TrainerParallel:
    """Parse ``fsdp=8``, ``hsdp=4x8`` (4 replicas of 8 shards), ``zero=8`` or ``tp=8,ep=8,pp=2,dp=1``.

    Any part may be left out.

    Raises:
        ConfigError: an unknown key, one given twice, or a number that is none.
    """
    pairs = _pairs("--trainers", text, ("fsdp", "hsdp", "zero", "tp", "ep", "pp", "dp"))
    alone = next((key for key in ("fsdp", "hsdp", "zero") if key in pairs), None)
    if alone and len(pairs) > 1:
        raise ConfigError("--trainers", text, f"give {alone} alone, or tp, ep, pp and dp")
    if alone == "fsdp":
        return Fsdp(_count("--trainers fsdp", pairs["fsdp"]))
    if alone == "zero":
        return Zero(_count("--trainers zero", pairs["zero"]))
    if alone == "hsdp":
        replicas, _, shards = pairs["hsdp"].partition("x")
        if not shards:
            raise ConfigError("--trainers hsdp", pairs["hsdp"], "give replicas x shards, such as 4x8")
        return Fsdp(_count("--trainers hsdp", shards), _count("--trainers hsdp", replicas))
    return MegatronOrder(**{key: _count(f"--trainers {key}", value) for key, value in pairs.items()})


def parse_engine(text: str) -> EngineParallel:
    """Parse ``tp=8``, ``tp=8,ep=8`` or ``tp=8,dp=2,ep=16``. Parts may be left out.

    Raises:
        ConfigError: an unknown key, one given twice, or a number that is none.
    """
    pairs = _pairs("--engine", text, ("tp", "ep", "dp"))
    return EngineParallel(**{key: _count(f"--engine {key}", value) for key, value in pairs.items()})


def _pairs(field: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in known:
            raise ConfigError(field, part, f"give key=number, separated by commas; {nearest(key, known)}")
        if not equals or key in pairs:
            raise ConfigError(field, text, f"give {key} once, with a number: {key}=8")
        pairs[key] = value
    return pairs


def _count(field: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text, re.ASCII):
        raise ConfigError(field, text, "give a whole number of at least 1")
    return int(text)
