"""Sampling settings, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from weightsync.config import load_dataclass
from weightsync.errors import ConfigError

_REMEDY = "give a list of token ids for each prompt, such as [tokenizer(text)['input_ids']]"
_MOST_SHOWN = 40


def check_prompts(prompts: object) -> None:
    """Raise ConfigError unless prompts are lists of token ids. Only each first token is checked."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        raise ConfigError("prompts", _shown(prompts), _REMEDY)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sized):
            raise ConfigError(f"prompts[{index}]", _shown(prompt), _REMEDY)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], (str, bytes)):
            raise ConfigError(f"prompts[{index}][0]", _shown(prompt[0]), _REMEDY)


def _shown(given: object) -> object:
    """Shorten a value for an error message."""
    if isinstance(given, (str, bytes)):
        return given[:_MOST_SHOWN]
    return given if isinstance(given, (int, float)) else type(given).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of one `generate` call.

    Attributes:
        max_tokens: a completion ends after this many tokens.
        temperature: 0 takes the likeliest token; otherwise the whole distribution is drawn from.
        seed: makes a call repeatable; equal prompts of one call are still drawn differently.
        stop_token_ids: a completion ends with the first of these, and with no other token.
        adapter: the name of the adapter that answers; empty for the model without one.

    Raises:
        ConfigError: naming the field, as ``sampling.<field>``.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError("sampling.max_tokens", self.max_tokens, "give 1 or more")
        if not self.temperature >= 0:
            raise ConfigError("sampling.temperature", self.temperature, "give 0 or more")

    def require_no_adapter(self) -> None:
        """Raise ConfigError, for engines without adapters."""
        if self.adapter:
            raise ConfigError("sampling.adapter", self.adapter, "leave it out: this engine has no adapters")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """Make settings from the argument of `generate`."""
        return load_dataclass(cls, settings, field="sampling")
