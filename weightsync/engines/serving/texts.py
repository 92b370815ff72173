"""Texts as prompts and completions, for engines that have a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from weightsync.engines.base import Prompts, Rollout
from weightsync.engines.serving.sampling import Sampling, shown
from weightsync.errors import ConfigError

_REMEDY = (
    "this engine has no tokenizer: give token ids, or start it with a model folder that has tokenizer.json, "
    "and without options.skip_tokenizer_init"
)


class Tokenizer(Protocol):
    """The methods of a tokenizer that are used here."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def token_ids(prompts: Prompts, settings: Sampling, tokenizer: Tokenizer | None) -> list[Sequence[int]]:
    """Return each prompt's token ids, `n` times in a row.

    Raises ConfigError if there are texts, among prompts or as `stop`, and no tokenizer.
    """
    if tokenizer is None:
        texts = {f"prompts[{i}]": each for i, each in enumerate(prompts) if isinstance(each, str)}
        if settings.stops:
            texts["sampling.stop"] = settings.stops[0]
        for where, text in texts.items():
            raise ConfigError(where, shown(text), _REMEDY)
    ids = [tokenizer.encode(each) if tokenizer and isinstance(each, str) else each for each in prompts]
    return [each for each in ids for _ in range(settings.n)]  # type: ignore[misc]  # no text is left


def with_texts(
    rollout: Rollout, prompts: Prompts, settings: Sampling, tokenizer: Tokenizer | None
) -> Rollout:
    """Return `rollout` with texts, if a prompt is one."""
    if tokenizer is None or not any(isinstance(each, str) for each in prompts):
        return rollout
    texts = []
    for tokens, reason in zip(rollout.tokens, rollout.finish_reasons, strict=True):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in settings.stops if reason == "stop" else ():
            text = text.partition(stop)[0]
        texts.append(text)
    return replace(rollout, texts=texts)
