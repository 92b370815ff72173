"""The quickstart's task: say the larger of two digits.

``max 3 7 =`` wants ``7``. The answer can be checked exactly, which is all that a verifiable reward
needs. An untrained model is right once in ``vocab_size`` tries, one that has learned only
to say a digit once in ten.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAD, EOS = "<pad>", "<eos>"
WORDS = (PAD, EOS, *"0123456789", "max", "=")
"""The words in the order of their token ids."""

_IDS = {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Return the token ids of words separated by blanks."""
    return [_IDS[word] for word in text.split()]


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: which of two digits is the larger?"""

    left: int
    right: int

    @property
    def prompt(self) -> list[int]:
        """The prompt as four token ids."""
        return encode(f"max {self.left} {self.right} =")

    @property
    def answer(self) -> list[int]:
        """The answer as one token id."""
        return encode(str(max(self.left, self.right)))


def reward(problem: Problem, completion: Sequence[int]) -> float:
    """Return 1.0 for exactly the answer, else 0.0."""
    return float(list(completion) == problem.answer)


class ProblemSampler:
    """Draws problems without end, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def sample(self, num_problems: int) -> list[Problem]:
        """Return the next `num_problems`. Each pair of digits is equally likely."""
        digit = self._random.randrange
        return [Problem(digit(10), digit(10)) for _ in range(num_problems)]
