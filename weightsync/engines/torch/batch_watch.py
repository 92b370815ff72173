"""Watches transformers complete a batch: where each row ends, why, and how likely the tokens were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.engines.base import Completion
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.texts import Tokenizer


class BatchWatch:
    """A stopping criterion of transformers, called after each step with all rows so far.

    It reads the model's logits itself, since transformers would keep the logits of all steps.
    """

    def __init__(
        self, settings: Sampling, ends: Sequence[int], tokenizer: Tokenizer | None, is_cut: Callable[[], bool]
    ) -> None:
        """`ends` are all tokens that end a row. `is_cut` returns whether all rows end now."""
        self._settings, self._tokenizer = settings, tokenizer
        self._ends, self._is_cut = torch.tensor(ends, dtype=torch.long), is_cut
        # Tokens at the end of a row in which a new stop is. A token has a byte or more.
        self._tail = max((len(stop.encode()) for stop in settings.stops), default=0)
        self._logits = torch.empty(0)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._lengths = torch.empty(0)

    @contextmanager
    def seeing(self, model: torch.nn.Module) -> Iterator[None]:
        """Read the logits of each step of `model`."""

        def see(_: torch.nn.Module, __: object, output: Any) -> None:  # noqa: ANN401 - transformers'
            self._logits = output.logits[:, -1].float()

        hook = model.register_forward_hook(see)
        try:
            yield
        finally:
            hook.remove()

    def __call__(self, ids: torch.Tensor, scores: Any, **_: object) -> torch.Tensor:  # noqa: ANN401 - unused
        """Return which rows have ended, bool ``[rows]``. `ids`: int64 ``[rows, length]``."""
        taken = ids[:, -1:]
        if not self._tokens:
            self._lengths = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        self._tokens.append(taken)
        self._logprobs.append(self._logits.log_softmax(-1).gather(1, taken))
        now = torch.isin(taken[:, 0], self._ends.to(ids.device))
        if self._tail:
            rows = torch.cat(self._tokens[-self._tail :], 1).tolist()
            now |= torch.tensor([self._has_stop(row) for row in rows], device=ids.device)
        self._lengths[now & (self._lengths == 0)] = len(self._tokens)
        return (self._lengths > 0) | self._is_cut()

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in self._settings.stops)

    def completions(self, version: int) -> list[Completion]:
        """Return each row up to the row's end. All tokens are of `version`."""
        tokens, logprobs = torch.cat(self._tokens, 1).tolist(), torch.cat(self._logprobs, 1).tolist()
        otherwise = "length" if len(self._tokens) == self._settings.max_tokens else "abort"
        return [
            Completion(
                ids[: length or None],
                [(version, length or len(ids))],
                values[: length or None] if self._settings.logprobs else [],
                "stop" if length else otherwise,
            )
            for length, ids, values in zip(self._lengths.tolist(), tokens, logprobs, strict=True)
        ]
