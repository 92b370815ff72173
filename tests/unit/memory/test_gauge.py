"""What a holder sees of its device, and the phases that it is told of."""

from __future__ import annotations

import threading

import pytest

from tests.fleets.loop import Loop, drive
from weightsync.driver.updating.gpu_peaks import peaks
from weightsync.errors import EngineError
from weightsync.holder.holder import Holder
from weightsync.holder.process import MemorySampler
from weightsync.protocol.timing import Span


def test_a_gauge_sees_what_changes_until_it_is_stopped() -> None:
    values, times = [5, 5, 7, 7, 7, 3], 0

    def read() -> int:
        nonlocal times
        times += 1
        return values[min(times, len(values)) - 1]

    before = {*threading.enumerate()}
    sample_memory = MemorySampler(read)
    (looking,) = {*threading.enumerate()} - before
    while times < len(values):
        pass
    samples = sample_memory.stop()
    assert [used for _, used in samples] == [5, 7, 3]
    times = [at for at, _ in samples]
    assert times[0] >= 0
    assert times == sorted(times)
    assert times[-1] < 60, "seconds since the first look"
    assert not looking.is_alive()


def test_a_sample_counts_until_the_next_one() -> None:
    samples = [(10.0, 4), (11.0, 9), (12.0, 6), (50.0, 8)]
    spans = [Span("before", 9.0, 0.5), Span("a", 10.5, 0.1), Span("b", 10.6, 1.0), Span("c", 12.5, 9.0)]
    assert peaks({"gpu": samples}, spans) == {
        "before": {"gpu": 4},
        "a": {"gpu": 4},
        "b": {"gpu": 9},
        "c": {"gpu": 8},
    }
    assert peaks({}, spans) == {}
    assert peaks({"gpu": ()}, spans)["a"] == {}


def test_without_a_device_nothing_is_seen() -> None:
    holder = Holder("h0", "127.0.0.1")
    assert holder.sample_memory(True) == holder.sample_memory(False) == ("", ())
    holder.close()


def test_an_update_that_wakes_engines_reports_the_peak_of_each_phase() -> None:
    async def work(loop: Loop) -> None:
        switched = []

        def sample_memory(on: bool) -> tuple[str, list[tuple[float, int]]]:
            switched.append(on)
            return "cuda:7", [(0.0, 11)]

        for holder in loop.holders[1:]:
            holder.sample_memory = sample_memory  # type: ignore[method-assign]
        await loop.controller.connect()
        assert (await loop.controller.update(1)).peak_memory == {}
        await loop.controller.sleep(["e1"], 2)
        report = await loop.controller.update(2)
        assert report.peak_memory == {phase: {"cuda:7": 11} for phase in report.phases}
        assert switched == [True, False]
        await loop.controller.sleep(["e0", "e1"], 2)
        for engine in loop.engines.values():
            engine.on_write = broken
        with pytest.raises(EngineError):
            await loop.controller.update(3)
        assert sorted(switched[2:]) == [False, False, True, True]

    drive(work)


def broken(_: str) -> None:
    raise MemoryError
