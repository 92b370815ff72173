"""A real vLLM of two ranks, each with a process of its own."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import build_tiny_qwen3
from weightsync.engines import Engine, make_engine
from weightsync.errors import ConfigError, RankLostError
from weightsync.faults import Fault

ENGINE, TIMEOUT_S = "engine e0", 10.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("vLLM runs on the GPU here")
    build_tiny_qwen3(tmp_path)
    options = {"tensor_parallel_size": 2, "max_model_len": 128, "max_num_seqs": 4}
    engine = make_engine("vllm", str(tmp_path), "e0", options)
    yield engine
    engine.close()


def ask_on(engine: Engine) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        engine.layout()


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_rank_that_is_stopped_is_named_to_all_who_ask_and_the_engine_ends(engine: Engine) -> None:
    assert len(engine.layout()) == 2
    engine.check()
    with pytest.raises(ConfigError, match="engine e0 has ranks 0 to 1"):
        engine.set_faults(ENGINE, [Fault(process=ENGINE, action="hang", at="idle", rank=2)], 0)
    engine.set_faults(ENGINE, [Fault(process=ENGINE, action="hang", at="idle", rank=1)], 0)
    with pytest.raises(
        RankLostError, match=r"engine e0, rank 1, is lost: its process \d+ is stopped"
    ) as told:
        ask_on(engine)
    assert pickle.loads(pickle.dumps(told.value)).rank == 1
    for ask in (
        engine.check,
        lambda: engine.pause("keep", TIMEOUT_S),
        lambda: engine.load(1, TIMEOUT_S),
        lambda: engine.generate([[1]], {"max_tokens": 1}),
    ):
        with pytest.raises(RankLostError, match="rank 1"):
            ask()
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() < begun + TIMEOUT_S
    assert not any(rank.state() for rank in engine.watch.ranks)
