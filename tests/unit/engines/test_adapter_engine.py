"""Which slot of an adapter is written and which one serves, with ranks that only take notes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.patience import patient
from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError
from weightsync.plan import RankLayout, Segment, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec

SPEC = AdapterSpec.of("math", [TensorMeta("up_proj.lora_A.weight", "float32", (2, 4))])
SOON_S = 0.1


class Ranks:
    """Two ranks. ``begin`` and `late` - 1 calls of ``outcome`` find the first one still writing."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.late, self.closed = 0, False
        self.error: Exception | None = None

    def __call__(self, method: str, *args: Any) -> list[Any]:
        if method == "begin":
            self.written.append(args[0])
        self.closed = method == "close"
        if method in ("begin", "outcome"):
            if self.error:
                raise self.error
            self.late -= 1
            return [None if self.late >= 0 else "loaded", "loaded"]
        return []


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def engine(ranks: Ranks) -> AdapterEngine:
    return AdapterEngine("e0", SPEC, (7, 8), ranks)


def update(engine: AdapterEngine, version: int) -> None:
    engine.pause("keep", patient(10))
    assert engine.load(1, patient(10)) == ["loaded", "loaded"]
    engine.resume(version)


def test_versions_take_turns_in_two_slots(engine: AdapterEngine, ranks: Ranks) -> None:
    assert engine.serving() == 0
    for version, number in ((3, 7), (4, 8), (9, 7)):
        ranks.late = 2
        update(engine, version)
        with engine.use() as served:
            assert (served.version, served.number) == (version, number)
    assert ranks.written == [7, 8, 7]
    assert engine.serving() == 9


def test_nothing_is_served_before_the_first_version(engine: AdapterEngine) -> None:
    with pytest.raises(StateError, match="adapter math of engine e0 has no version yet"), engine.use():
        pass
    with pytest.raises(StateError, match="was not written"):
        engine.resume(1)


def test_a_slot_that_requests_use_is_not_written(engine: AdapterEngine, ranks: Ranks) -> None:
    update(engine, 1)
    with engine.use() as first:
        update(engine, 2)
        with pytest.raises(DeadlineError, match=r"engine e0: 1 calls of generate that use adapter math"):
            engine.pause("keep", SOON_S)
        with pytest.raises(DeadlineError):
            engine.load(1, SOON_S)
        assert ranks.written == [7, 8]
        with engine.use() as second:
            assert (first.version, second.version) == (1, 2)
    update(engine, 3)


def test_a_load_that_was_given_up_gives_no_version_to_the_other_slot(ranks: Ranks) -> None:
    """The driver gave it up. It asks ranks once more, late, and finds what the next load wrote."""
    late, go_on = threading.Event(), threading.Event()

    def on_ranks(method: str, *args: Any) -> list[Any]:
        if method == "outcome" and threading.current_thread() is given_up:
            late.set()
            assert go_on.wait(patient(10))
        return ranks(method, *args)

    engine = AdapterEngine("e0", SPEC, (7, 8), on_ranks)
    update(engine, 1)
    engine.pause("keep", patient(10))
    ranks.late, refused = 1, list[StateError]()

    def load() -> None:
        try:
            engine.load(2, patient(10))
        except StateError as error:
            refused.append(error)

    given_up = threading.Thread(target=load)
    given_up.start()
    assert late.wait(patient(10))
    engine.load(3, patient(10))
    engine.resume(2)
    engine.pause("keep", patient(10))
    go_on.set()
    given_up.join()
    engine.resume(2)  # as after a pause without an update
    with engine.use() as served:
        assert (served.number, served.version) == (8, 2)
    assert "a later load" in str(*refused)


def test_an_update_goes_on_once_the_last_request_ended(engine: AdapterEngine) -> None:
    update(engine, 1)
    with engine.use():
        update(engine, 2)
        waiting = threading.Thread(target=update, args=(engine, 3))
        waiting.start()
        time.sleep(SOON_S)
        assert engine.serving() == 2
    waiting.join(patient(10))
    assert engine.serving() == 3


def test_a_load_that_failed_leaves_the_version_that_serves(engine: AdapterEngine, ranks: Ranks) -> None:
    update(engine, 1)
    ranks.error = EngineError("e0", "load", "a holder died", 0)
    with pytest.raises(EngineError, match="a holder died"):
        engine.load(2, patient(10))
    assert engine.serving() == 1
    engine.resume(1)  # an update that failed before it moved anything
    with pytest.raises(StateError, match="was not written"):
        engine.resume(2)
    with engine.use() as served:
        assert (served.version, served.number) == (1, 7)


def test_a_version_that_is_sent_again_is_what_was_written_last(engine: AdapterEngine) -> None:
    """A driver that missed the answer to a commit counts the version as failed, and sends it again."""
    update(engine, 1)
    update(engine, 1)
    with engine.use() as served:
        assert (served.version, served.number) == (1, 8)


def test_what_was_written_and_not_served_is_forgotten_by_the_next_pause(engine: AdapterEngine) -> None:
    update(engine, 1)
    engine.load(2, patient(10))
    engine.pause("keep", patient(10))
    with pytest.raises(StateError, match="was not written"):
        engine.resume(2)
    engine.resume(1)
    with engine.use() as served:
        assert (served.version, served.number) == (1, 7)


def test_ranks_that_do_not_end_are_named(engine: AdapterEngine, ranks: Ranks) -> None:
    ranks.late = 10**6
    with pytest.raises(DeadlineError, match="engine e0 rank 0") as error:
        engine.load(1, SOON_S)
    assert "rank 1" not in str(error.value)


def test_slots_are_given_back_once_no_request_uses_them(engine: AdapterEngine, ranks: Ranks) -> None:
    update(engine, 1)
    with engine.use():
        with pytest.raises(DeadlineError, match=r"close: .* engine e0: 1 calls of generate"):
            engine.close(SOON_S)
        assert not ranks.closed
        with pytest.raises(StateError, match="is closed"), engine.use():
            pass
    engine.close()
    assert ranks.closed
    with pytest.raises(StateError, match="is closed"), engine.use():
        pass


@pytest.mark.parametrize("held", [[], ["up_proj.lora_A.weight"]], ids=["alone", "beside others"])
def test_a_module_without_a_slot_is_refused_by_name(held: list[str]) -> None:
    named = [*held, "lm_head.lora_A.weight", "lm_head.lora_B.weight"]
    spec = AdapterSpec.of("math", [TensorMeta(name, "float32", (2, 2)) for name in named])
    metas = tuple(meta for meta in spec.tensors if meta.name in held)
    rank = LayoutTable.of(RankLayout(metas, tuple(map(Segment.whole, metas))))
    engine = AdapterEngine("e0", spec, (7, 8), lambda method: [rank, rank])
    with pytest.raises(
        ConfigError, match=r"adapter: 'math' .* e0 has no slot for lm_head\.lora_A.*: leave lm_head out"
    ):
        engine.layout()
