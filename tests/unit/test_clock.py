"""Phases of one piece of work."""

from __future__ import annotations

from weightsync import clock as module
from weightsync.clock import PhaseClock


def test_a_phase_that_runs_again_counts_twice(monkeypatch, caplog) -> None:
    caplog.set_level("DEBUG", "weightsync.clock")
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 25.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock = PhaseClock()
    for name in ("plan", "join", "plan"):
        with clock.phase(name):
            pass
    assert clock.seconds == {"plan": 7.0, "join": 4.0}
    assert [span.name for span in clock.spans] == ["plan", "join", "plan"]
    assert caplog.messages == ["plan: 2.000 s", "join: 4.000 s", "plan: 5.000 s"]
