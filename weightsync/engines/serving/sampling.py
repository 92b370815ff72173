"""Sampling settings: those that every engine has, and others that one engine knows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weightsync.config import load_dataclass
from weightsync.errors import ConfigError, nearest

_REMEDY = "give a text, or a list of token ids, for each prompt"
_MOST_SHOWN = 40


def check_prompts(prompts: object) -> None:
    """Raise ConfigError unless prompts are texts or lists of token ids. Only each first token is checked."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
        raise ConfigError("prompts", shown(prompts), _REMEDY)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sized):
            raise ConfigError(f"prompts[{index}]", shown(prompt), _REMEDY)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], (str, bytes)):
            raise ConfigError(f"prompts[{index}][0]", shown(prompt[0]), _REMEDY)


def shown(given: object) -> object:
    """Shorten a value for an error message."""
    if isinstance(given, (str, bytes)):
        return given[:_MOST_SHOWN]
    return given if isinstance(given, (int, float)) else type(given).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of one `generate` call. Every engine has these, and may have more, such as ``top_p``.

    Attributes:
        max_tokens: a completion ends after this many tokens.
        temperature: 0 takes the likeliest token; otherwise the whole distribution is drawn from.
        seed: makes a call repeatable; equal prompts of one call are still drawn differently.
        stop_token_ids: a completion ends with the first of these tokens, and with no other token.
        stop: a completion also ends with the first of these texts. Needs a tokenizer.
        ignore_eos: False also ends a completion with the model's own end tokens.
        n: completions per prompt.
        logprobs: False leaves out the log-probabilities, which cost an engine some time per token.
        adapter: the name of the adapter that answers; empty for the model without an adapter.
        passed: settings that are passed on to the engine, under the engine's names.

    Raises:
        ConfigError: naming the field, as ``sampling.<field>``.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: str | tuple[str, ...] = ()
    ignore_eos: bool = True
    n: int = 1
    logprobs: bool = True
    adapter: str = ""
    passed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "n"):
            if getattr(self, name) < 1:
                raise ConfigError(f"sampling.{name}", getattr(self, name), "give 1 or more")
        if not self.temperature >= 0:
            raise ConfigError("sampling.temperature", self.temperature, "give 0 or more")
        if "" in self.stops:
            raise ConfigError("sampling.stop", self.stop, "give texts that are not empty")

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def require_known(self, known: Collection[str], refused: Mapping[str, str]) -> None:
        """Raise ConfigError for a passed setting that the engine does not know, or that is `refused`.

        `refused`: remedies by name.
        """
        for name, value in self.passed.items():
            if name in refused:
                raise ConfigError(f"sampling.{name}", value, refused[name])
            if name not in known:
                valid = {*known, *_COMMON} - refused.keys()
                raise ConfigError(f"sampling.{name}", value, f"the key is unknown; {nearest(name, valid)}")

    def refusal(self, engine: str, error: Exception) -> ConfigError:
        """Return the error for a value that the engine refuses, with the field that it names, if any."""
        values = {**{name: getattr(self, name) for name in _COMMON}, **self.passed}
        said = " ".join(str(error).split())
        name = next((each for each in re.findall(r"\w+", said) if each in values), "")
        where, value = (f"sampling.{name}", values[name]) if name else ("sampling", dict(self.passed))
        return ConfigError(where, value, f"{engine} says: {said}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """Make settings from the argument of `generate`."""
        common = {name: value for name, value in settings.items() if name in _COMMON}
        passed = {name: value for name, value in settings.items() if name not in _COMMON}
        return replace(load_dataclass(cls, common, field="sampling"), passed=passed)


_COMMON = [each.name for each in fields(Sampling) if each.name != "passed"]
