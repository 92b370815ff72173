"""How completions are drawn, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsync.config import load_dataclass
from weightsync.errors import ConfigError

__all__ = ["Sampling"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of one `generate` call.

    Attributes:
        max_tokens: a completion ends after this many tokens.
        temperature: 0 takes the likeliest token; otherwise the whole distribution is drawn from.
        seed: makes a call repeatable; equal prompts of one call are still drawn differently.
        stop_token_ids: a completion ends with the first of these, and with no other token.

    Raises:
        ConfigError: naming the field, as ``sampling.<field>``.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("sampling.max_tokens", self.max_tokens, "give 1 or more")
        if not self.temperature >= 0:
            raise ConfigError("sampling.temperature", self.temperature, "give 0 or more")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From `generate`'s argument."""
        return load_dataclass(cls, settings, field="sampling")
