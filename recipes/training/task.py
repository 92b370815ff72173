"""The quickstart's task: say the larger of two digits.

``max 3 7 =`` wants ``7``, and two pairs, ``max 3 7 max 4 1 =``, want ``7 4``. The answer can be checked
exactly, which is all that a verifiable reward needs. For one pair, an untrained model is right once in
``vocab_size`` tries, one that has learned only to say a digit once in ten.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

PAD, EOS = "<pad>", "<eos>"
WORDS = (PAD, EOS, *"0123456789", "max", "=")
"""The words in the order of their token ids."""

_IDS = {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Return the token ids of words separated by blanks."""
    return [_IDS[word] for word in text.split()]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: the larger of two digits, for one pair and for each of the `further` pairs."""

    left: int
    right: int
    further: tuple[tuple[int, int], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All pairs of digits."""
        return ((self.left, self.right), *self.further)

    @property
    def prompt(self) -> list[int]:
        """The prompt as token ids, three for each pair and one."""
        return encode(" ".join(f"max {left} {right}" for left, right in self.pairs) + " =")

    @property
    def answer(self) -> list[int]:
        """The answer as one token id for each pair."""
        return encode(" ".join(str(max(pair)) for pair in self.pairs))


def reward(problem: Problem, completion: Sequence[int]) -> float:
    """Return the fraction of the answer's tokens that are right; 0.0 for a longer completion."""
    if len(completion) > len(problem.answer):
        return 0.0
    num_right: int = sum(map(eq, completion, problem.answer))
    return num_right / len(problem.answer)


class ProblemSampler:
    """Draws problems of `num_pairs` without end, the same ones for the same seed."""

    def __init__(self, seed: int, num_pairs: int = 1) -> None:
        self._random, self._num_pairs = random.Random(seed), num_pairs

    def sample(self, num_problems: int) -> list[Problem]:
        """Return the next `num_problems`. Each pair of digits is equally likely."""
        return [self._draw() for _ in range(num_problems)]

    def _draw(self) -> Problem:
        digit = self._random.randrange
        (left, right), *further = [(digit(10), digit(10)) for _ in range(self._num_pairs)]
        return Problem(left, right, tuple(further))
