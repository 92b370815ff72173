from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync.recipes.training.task import EOS, WORDS, Problem, ProblemSampler, encode, reward

digits = st.integers(0, 9)


@given(left=digits, right=digits, said=digits)
def test_only_the_larger_digit_earns(left: int, right: int, said: int) -> None:
    problem = Problem(left, right)
    assert reward(problem, encode(str(said))) == (1.0 if said == max(left, right) else 0.0)


def test_a_right_answer_with_more_after_it_earns_nothing() -> None:
    problem = Problem(3, 7)
    assert reward(problem, encode("7")) == 1.0
    assert reward(problem, encode(f"7 {EOS}")) == 0.0
    assert reward(problem, []) == 0.0


def test_each_of_several_pairs_earns_its_part() -> None:
    problem = Problem(3, 7, ((4, 1),))
    assert [WORDS[token] for token in problem.prompt] == ["max", "3", "7", "max", "4", "1", "="]
    for said, earned in (("7 4", 1.0), ("7 1", 0.5), ("3 4", 0.5), ("7", 0.5), ("4 7", 0.0), ("7 4 7", 0.0)):
        assert reward(problem, encode(said)) == earned
    assert all(len(each.answer) == 3 for each in ProblemSampler(1, 3).sample(5))


def test_a_prompt_reads_as_written() -> None:
    assert [WORDS[token] for token in Problem(3, 7).prompt] == ["max", "3", "7", "="]


def test_the_seed_decides_the_problems() -> None:
    first, again, other = (ProblemSampler(seed) for seed in (1, 1, 2))
    drawn = first.sample(20)
    assert drawn == again.sample(20)
    assert drawn != other.sample(20)
    assert drawn != first.sample(20)


def test_every_pair_of_digits_comes_up() -> None:
    assert len(set(ProblemSampler(0).sample(2000))) == 100
