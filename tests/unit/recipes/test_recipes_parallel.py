from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.recipes.forecast.parallel import (
    EngineParallel,
    Fsdp,
    MegatronOrder,
    Zero,
    parse_engine,
    parse_trainers,
)


@pytest.mark.parametrize(
    ("text", "parsed", "num_ranks"),
    [
        ("fsdp=8", Fsdp(8), 8),
        ("hsdp=4x8", Fsdp(shards=8, replicas=4), 32),
        ("zero=8", Zero(8), 8),
        ("tp=8,ep=8,pp=2", MegatronOrder(tp=8, ep=8, pp=2), 16),
        ("pp=3,dp=2", MegatronOrder(pp=3, dp=2), 6),
        ("tp=2,dp=4,ep=8", MegatronOrder(tp=2, dp=4, ep=8), 8),
    ],
)
def test_trainers(text: str, parsed: Fsdp | MegatronOrder, num_ranks: int) -> None:
    assert parse_trainers(text) == parsed
    assert parsed.num_ranks == num_ranks


def test_engine() -> None:
    assert parse_engine("tp=8") == EngineParallel(tp=8)
    assert parse_engine("tp=4,dp=4,ep=16") == EngineParallel(tp=4, ep=16, dp=4)
    assert EngineParallel(tp=4, ep=16, dp=4).num_ranks == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "fsd=8",
            "--trainers: 'fsd=8' is not valid; give key=number, separated by commas; did you mean 'fsdp'?",
        ),
        ("", "--trainers: '' is not valid"),
        ("fsdp", "--trainers: 'fsdp' is not valid; give fsdp once, with a number: fsdp=8"),
        ("tp=8,tp=4", "give tp once"),
        ("fsdp=0", "--trainers fsdp: '0' is not valid; give a whole number of at least 1"),
        ("fsdp=8.0", "--trainers fsdp: '8.0' is not valid"),
        ("fsdp= 8", "--trainers fsdp: ' 8' is not valid"),
        ("tp=-1", "--trainers tp: '-1' is not valid"),
        ("fsdp=8,tp=2", "give fsdp alone, or tp, ep, pp and dp"),
        ("hsdp=8", "--trainers hsdp: '8' is not valid; give replicas x shards, such as 4x8"),
        ("hsdp=4x", "--trainers hsdp: '4x' is not valid"),
        ("hsdp=4x8x2", "--trainers hsdp: '8x2' is not valid"),
        ("tp=2,ep=4", "--trainers ep: 4 is not valid; give a divisor of tp x dp, 2"),
    ],
)
def test_trainers_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_trainers(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp=2", "--engine: 'pp=2' is not valid; give key=number, separated by commas; did you mean"),
        ("tp=8,ep=3", "--engine ep: 3 is not valid; give a divisor of tp x dp, 8"),
        ("tp=x", "--engine tp: 'x' is not valid"),
    ],
)
def test_engines_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_engine(text)
    assert says in str(caught.value)
