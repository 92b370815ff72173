from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.patience import patient
from weightsync.recipes.report.run_report import RunReport, StepRow
from weightsync.recipes.report.screen import Screen
from weightsync.report import Covered, HealReport, coverage_table


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def screen(shown: io.StringIO) -> Screen:
    return Screen(Console(file=shown, width=60))


def row(*, verified: bool) -> StepRow:
    return StepRow(
        step=7,
        version=8,
        reward=0.5,
        sync_seconds=0.0234,
        bytes=1_250_000,
        verified=verified,
        engines={"main-0": 8},
        rollout_versions=[7],
    )


def test_a_step_is_one_plain_line_however_narrow_the_screen(screen: Screen, shown: io.StringIO) -> None:
    screen.step(row(verified=True), 30)
    screen.step(row(verified=False), 30)
    right, wrong = shown.getvalue().splitlines()
    assert " ".join(right.split()) == "step 7/30 reward 0.500 █████ version 8 1.25 MB sync 23 ms verified"
    assert wrong.endswith("NOT VERIFIED")
    screen.step(replace(row(verified=True), engines={"main-0": 8, "main-1": 0}), 30)
    assert shown.getvalue().endswith("verified on 1 of 2 engines\n")


def test_the_mismatch_of_a_step_is_shown_and_the_largest_at_the_end(
    screen: Screen, shown: io.StringIO
) -> None:
    steps = [replace(row(verified=True), mismatch=value) for value in (2.5e-3, 1e-7)]
    screen.step(steps[1], 30)
    assert "mismatch 1e-07  version" in shown.getvalue()
    screen.summary(RunReport(name="quickstart", seed=0, status="done", steps=steps))
    assert re.search(r"mismatch, largest +│ 2\.5e-03", shown.getvalue())


def test_accepted_drafts_are_shown_for_engines_that_speculate_alone(
    screen: Screen, shown: io.StringIO
) -> None:
    steps = [row(verified=True), replace(row(verified=True), acceptance=0.125)]
    steps.append(replace(row(verified=True), acceptance=0.71))
    for each in steps:
        screen.step(each, 30)
    without, first, last = shown.getvalue().splitlines()
    assert "accepted" not in without
    assert "accepted  12%  version" in first
    assert "accepted  71%  version" in last
    screen.summary(RunReport(name="speculative", seed=0, status="done", steps=steps))
    assert re.search(r"drafted tokens accepted +│ 12% in the first step, +", shown.getvalue())
    assert shown.getvalue().count("accepted") == 3
    screen.summary(RunReport(name="quickstart", seed=0, status="done", steps=steps[:1]))
    assert shown.getvalue().count("accepted") == 3


def test_text_in_brackets_is_not_taken_for_markup(screen: Screen, shown: io.StringIO) -> None:
    screen.line("box [0, 3] of [bold]")
    assert shown.getvalue() == "box [0, 3] of [bold]\n"


def test_a_stage_says_how_long_it_took(screen: Screen, shown: io.StringIO) -> None:
    with screen.stage("connect"):
        pass
    assert re.fullmatch(r"connect: \d+\.\d s", shown.getvalue().strip())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stage_with_a_bar_of_its_own_has_no_spinner(is_terminal: bool) -> None:
    shown = io.StringIO()
    with Screen(Console(file=shown, force_terminal=is_terminal)).stage("connect", has_bar=True):
        assert shown.getvalue() == ""
    assert re.fullmatch(r"connect: \d+\.\d s", shown.getvalue().strip())


def test_a_long_wait_says_what_is_awaited_and_for_how_long() -> None:
    told = threading.Event()

    class Shown(io.StringIO):
        def write(self, text: str) -> int:
            if "so far" in text:
                told.set()
            return super().write(text)

    shown = Shown()
    with Screen(Console(file=shown, width=60), tell_every_s=0.01).stage("start 2 engines"):
        assert told.wait(patient(10))
    *waits, end = shown.getvalue().splitlines()
    assert {re.sub(r"\d+ s", "0 s", line) for line in waits} == {"start 2 engines: 0 s so far"}
    assert re.fullmatch(r"start 2 engines: \d+\.\d s", end)


def test_a_terminal_gets_a_spinner_instead() -> None:
    shown = io.StringIO()
    with Screen(Console(file=shown, force_terminal=True), tell_every_s=0.0).waiting("start 2 engines"):
        pass
    assert "start 2 engines …" in shown.getvalue()
    assert "so far" not in shown.getvalue()


def test_the_summary_counts_what_was_verified(screen: Screen, shown: io.StringIO) -> None:
    report = RunReport(name="quickstart", seed=0, status="done", target_reward=0.8)
    report.engines = {"main-0": {"kind": "vllm"}, "main-1": {"kind": "vllm"}}
    report.steps = [row(verified=True), row(verified=False)]
    report.coverage = [
        Covered.of(name, "model", (), "direct", "identity", version=2) for name in report.engines
    ]
    screen.summary(report)
    text = shown.getvalue()
    table = coverage_table(report.coverage)
    for expected in ("quickstart: done", "1 of 2", "2 vllm", "0.500 (target 0.8)", table):
        assert expected in text
    assert "on all engines" not in text


def test_the_summary_says_how_many_updates_all_engines_took(screen: Screen, shown: io.StringIO) -> None:
    took, left_out = {"main-0": 8, "main-1": 8}, {"main-0": 8, "main-1": 0}
    steps = [replace(row(verified=True), engines=engines) for engines in (took, left_out, took)]
    steps.append(replace(row(verified=False), engines=took))
    screen.summary(RunReport(name="quickstart", seed=0, status="done", steps=steps))
    assert "3 of 4; 2 on all engines" in shown.getvalue()


def test_the_median_of_an_even_number_of_updates_is_the_mean_of_both(
    screen: Screen, shown: io.StringIO
) -> None:
    report = RunReport(name="quickstart", seed=0, status="done")
    report.steps = [replace(row(verified=True), sync_seconds=seconds) for seconds in (0.03, 0.01, 0.05, 0.02)]
    screen.summary(report)
    assert "25 ms, 50 ms" in shown.getvalue()


def test_the_summary_of_a_run_that_failed_says_why(screen: Screen, shown: io.StringIO) -> None:
    screen.summary(RunReport(name="quickstart", seed=0, status="failed", error="trainer 0 is gone"))
    assert shown.getvalue().endswith("\nfailed: trainer 0 is gone\n")


def test_the_summary_ends_with_a_line_for_each_heal(screen: Screen, shown: io.StringIO) -> None:
    report = RunReport(name="chaos", seed=0, status="done", steps=[row(verified=True)])
    heal = HealReport(
        engine="main-1",
        cause="engine main-1 is gone: killed",
        version=8,
        died_at=100.0,
        respawned_at=101.0,
        serving_at=102.5,
        bytes_from={"holder 0": 1_250_000},
        ways={"holder 0": "tcp"},
        gb_per_s=1.5,
        verified=True,
    )
    report.heals = [heal, heal]
    screen.summary(report)
    *_, last, again, end = shown.getvalue().split("\n")
    assert (last, end) == (again, "")
    assert last == str(heal)
