"""Phases of one piece of work."""

from __future__ import annotations

import time

import pytest

from weightsync.protocol import timing as module
from weightsync.protocol.timing import PhaseClock


def test_a_phase_that_runs_again_counts_twice(monkeypatch, caplog) -> None:
    caplog.set_level("DEBUG", "weightsync.protocol")
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 25.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock = PhaseClock()
    for name in ("plan", "join", "plan"):
        with clock.phase(name):
            pass
    assert clock.seconds == {"plan": 7.0, "join": 4.0}
    assert [span.name for span in clock.spans] == ["plan", "join", "plan"]
    assert caplog.messages == ["plan: 2.000 s", "join: 4.000 s", "plan: 5.000 s"]


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_stamps_of_one_piece_of_work_are_apart_as_long_as_it_took_though_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, shift_s: float
) -> None:
    real = time.time
    clock = PhaseClock()
    assert abs(clock.began - real()) < 60
    with clock.phase("publish"):
        monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    with clock.phase("move"):
        pass
    publish, move = clock.spans
    assert clock.began <= publish.began <= publish.began + publish.seconds <= move.began + 1e-6
    assert move.began + move.seconds <= clock.now() + 1e-6 < clock.began + 60
    assert clock.total() < 60
