"""Prints a run: one line per step and a table at the end.

Plain lines without a terminal.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.table import Table

from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.report.run_report import RunReport, StepRow
from weightsync.recipes.report.time_shares import last_update
from weightsync.report import coverage_table
from weightsync.text import size_text

_BAR_WIDTH = 40


class Screen:
    """Prints a run to `console`, which decides about colours and the spinner."""

    def __init__(self, console: Console, tell_every_s: float = 10.0) -> None:
        """`tell_every_s`: seconds between two lines of a wait, if the console is no terminal."""
        self._console, self._tell_every_s = console, tell_every_s

    @contextmanager
    def stage(self, what: str, *, has_bar: bool = False) -> Iterator[None]:
        """Print the name of a stage, then the seconds. If it `has_bar` of its own, show no spinner."""
        start = time.monotonic()
        with nullcontext() if has_bar and self._console.is_terminal else self.waiting(what):
            yield
        self.line(f"{what}: {time.monotonic() - start:.1f} s")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a spinner on a terminal; elsewhere print a line every ten seconds."""
        if self._console.is_terminal:
            with self._console.status(f"{what} …"):
                yield
            return
        over = threading.Event()
        teller = threading.Thread(target=self._tell, args=(what, over), daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def _tell(self, what: str, over: threading.Event) -> None:
        start = time.monotonic()
        while not over.wait(self._tell_every_s):
            self.line(f"{what}: {time.monotonic() - start:.0f} s so far")

    def line(self, text: str) -> None:
        """Print the lines of `text` unchanged, without wrapping or markup."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def step(self, row: StepRow, num_steps: int) -> None:
        """Print the line of one step."""
        width = len(str(num_steps))
        bar = "█" * round(row.reward * 10)
        accepted = "" if row.acceptance is None else f"  accepted {row.acceptance:4.0%}"
        mismatch = "" if row.mismatch is None else f"  mismatch {row.mismatch:.0e}"
        proof = row.proof if row.verified else row.proof.upper()
        self.line(
            f"step {row.step:{width}}/{num_steps}  reward {row.reward:.3f} {bar:<10}{mismatch}{accepted}"
            f"  version {row.version:{width}}  {size_text(row.bytes)}"
            f"  sync {row.sync_seconds * 1e3:4.0f} ms  {proof}"
        )

    def summary(self, report: RunReport, cluster: tuple[str, HostSpec] | None = None) -> None:
        """Print the figures, the coverage of engines, the error, and a line for each heal.

        `cluster` gives the rates of links, and so the floor of an update.
        """
        kinds = Counter(str(info.get("kind")) for info in report.engines.values())
        table = Table(title=f"{report.name}: {report.status}", show_header=False, title_justify="left")
        for row in _figures(report) if report.steps else ():
            table.add_row(*row)
        if shares := last_update(report, cluster):
            table.add_row("last update", f"{shares.bar(_BAR_WIDTH)}\n{shares}")
        table.add_row("engines", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        self._console.print(table)
        if report.coverage:
            self.line(coverage_table(report.coverage))
        if report.error:
            self.line(f"failed: {report.error}")
        for heal in report.heals:
            self.line(str(heal))


def _figures(report: RunReport) -> Iterator[tuple[str, str]]:
    steps = report.steps
    seconds = [row.sync_seconds for row in steps]
    median, longest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    yield "reward, first step", f"{report.first_reward:.3f}"
    yield "reward, mean of the last steps", f"{report.final_reward:.3f} (target {report.target_reward:g})"
    if shares := report.acceptances:
        yield (
            "drafted tokens accepted",
            f"{shares[0][1]:.0%} in the first step, {shares[-1][1]:.0%} in the last",
        )
    if off := report.mismatches:
        yield "mismatch, largest", f"{max(value for _, value in off):.1e}"
    verified = f"{report.num_verified} of {len(steps)}"
    yield "updates verified", "; ".join(filter(None, (verified, report.on_all)))
    yield "sync, median and longest", f"{median:.0f} ms, {longest:.0f} ms"
    yield "bytes of one update", size_text(steps[-1].bytes)
