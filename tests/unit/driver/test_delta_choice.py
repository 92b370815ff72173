"""Which links between hosts get deltas: by their rates, and by what deltas cost."""

from __future__ import annotations

import pytest

from weightsync.driver.snapshots.delta_choice import LOOK_AGAIN, DeltaChoice
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.messages import Delta, StagedPart
from weightsync.protocol.timing import Span

NBYTES = 10**9
SLOW, FAST = 10**8, 10**10
"""Bytes per second."""
OFFER = Offer(
    holder="holder 0", protocol="zeromq", memory=BufferHandle.unmapped(NBYTES), endpoint="tcp://a:1"
)


def made(nbytes: int, seconds: float = 1.0) -> Delta:
    return Delta(1, OFFER if nbytes < NBYTES else None, nbytes, seconds)


def copied(nbytes: int, seconds: float) -> StagedPart:
    return StagedPart(0, OFFER, None, "zeromq", nbytes, [Span("copy", 0.0, seconds)])


def run(choice: DeltaChoice, rate: float, delta: Delta, num: int, apply_s: float = 0.5) -> list[str]:
    """Update `num` times over one link. Returns what each update did."""
    done = []
    for _ in range(num):
        makes = choice.makes(0, NBYTES, [1])
        takes = makes and choice.takes(0, NBYTES, 1, delta)
        nbytes = delta.nbytes if takes else NBYTES
        choice.note((0, 1), copied(nbytes, nbytes / rate + apply_s * takes), NBYTES)
        done.append("takes" if takes else "makes" if makes else "whole")
    return done


def test_a_slow_link_gets_deltas_from_the_second_version_on() -> None:
    assert run(DeltaChoice("auto"), SLOW, made(NBYTES // 50), 4) == ["whole", "takes", "takes", "takes"]


def test_on_a_fast_link_they_are_made_once_in_a_while() -> None:
    done = run(DeltaChoice("auto"), FAST, made(NBYTES // 50), 2 * LOOK_AGAIN + 4)
    assert done.count("whole") >= len(done) - 4
    assert done[-LOOK_AGAIN - 1 :].count("takes") + done[-LOOK_AGAIN - 1 :].count("makes") == 1


def test_what_changes_everywhere_is_sent_whole_and_looked_at_again() -> None:
    choice = DeltaChoice("auto")
    dense = made(NBYTES)
    assert run(choice, SLOW, dense, LOOK_AGAIN + 3).count("makes") == 2
    assert "takes" in run(choice, SLOW, made(NBYTES // 50), LOOK_AGAIN + 1)


def test_a_delta_is_not_taken_if_its_use_is_slower_than_the_link() -> None:
    choice = DeltaChoice("auto")
    done = run(choice, SLOW, made(NBYTES // 2), 20, apply_s=6.0)
    assert done[:7] == ["whole", "takes", *4 * ["whole"], "takes"]
    assert done.count("takes") < len(done) / 2


def test_each_link_is_judged_by_its_own_rate() -> None:
    choice = DeltaChoice("auto")
    assert not choice.makes(0, NBYTES, [1, 2])
    choice.note((0, 1), copied(NBYTES, NBYTES / SLOW), NBYTES)
    choice.note((0, 2), copied(NBYTES, NBYTES / FAST), NBYTES)
    assert choice.makes(0, NBYTES, [1, 2])
    delta = made(NBYTES // 2)
    assert [choice.takes(0, NBYTES, home, delta) for home in (1, 2)] == [True, True]
    choice.note((0, 2), copied(delta.nbytes, 1.0), NBYTES)
    assert [choice.takes(0, NBYTES, home, delta) for home in (1, 2)] == [True, False]


@pytest.mark.parametrize(("mode", "wanted"), [("none", False), ("always", True)])
def test_other_modes_measure_nothing(mode: str, wanted: bool) -> None:
    choice = DeltaChoice(mode)  # type: ignore[arg-type]
    assert choice.makes(0, NBYTES, [1]) == wanted
    assert not choice.makes(0, NBYTES, [])
    assert choice.takes(0, NBYTES, 1, made(NBYTES // 2)) == wanted
    assert not choice.takes(0, NBYTES, 1, made(NBYTES))


def test_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="weightsync.driver")
    run(DeltaChoice("auto"), SLOW, made(NBYTES // 50), 5)
    (line,) = caplog.messages
    assert "part 0 goes to holder 1 only with its changes: 20 MB of 1 GB" in line
