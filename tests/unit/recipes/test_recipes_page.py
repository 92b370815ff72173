"""The page of a run: what it says, that names cannot break it, and what a browser makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.chromium import chromium, show
from weightsync.errors import ConfigError
from weightsync.protocol.timing import Span
from weightsync.recipes.report.page import page, write_page
from weightsync.recipes.report.run_report import RunReport, StepRow
from weightsync.report import Covered, HealReport, Link

SCRIPT = "<script>console.error('ran')</script>"
HOSTILE = (
    SCRIPT,
    '"><img src=http://example.invalid/x onerror=alert(1)>',
    "{{ 7 * 191 }}",
    "x" * 300,
)


def run_report(engines: tuple[str, ...] = ("main-0", "main-1"), num_steps: int = 16) -> RunReport:
    """The second engine is missing from version 7 to 10, and comes back by itself."""
    report = RunReport(name="quickstart", seed=3, target_reward=0.8, status="done")
    report.host = {"name": "host-a", "system": "Linux", "python": "3.11", "num_cpus": 2}
    report.devices = "2 GPUs (H200)"
    report.engines = {name: {"kind": "torch", "why": "asked for"} for name in engines}
    for step in range(1, num_steps + 1):
        away = 6 <= step < 10
        report.steps.append(
            StepRow(
                step=step,
                version=step + 1,
                reward=step / num_steps,
                sync_seconds=0.02 + step / 1000,
                bytes=1_250_000,
                verified=step != 3,
                engines={engines[0]: step + 1, engines[1]: 0 if away else step + 1},
                rollout_versions=[step],
                committed_at=1.7e9 + step,
                gb_per_s=0.125,
                phases={"publish": 0.01, "pause": 0.001, "move": 0.02 + step / 1000, "commit": 0.002},
                routes={engines[0]: "direct", engines[1]: "sync.mode is broadcast"},
                proofs={engines[0]: "live weights"},
                failures={engines[1]: f"{engines[1]} is gone"} if step == 6 else {},
                retried="wrong bytes in w" if step == 12 else "",
            )
        )
    report.heals.append(
        HealReport(
            engine=engines[1],
            cause="the process ended",
            version=11,
            died_at=1.7e9,
            respawned_at=1.7e9 + 3,
            serving_at=1.7e9 + 4.5,
            bytes_from={"holder 0": 600_000, "holder 1": 650_000},
            ways={"holder 0": "mapped", "holder 1": "tcp"},
            gb_per_s=0.1,
            verified=True,
        )
    )
    report.links = [
        Link("trainer 0", f"engine {engines[0]} rank 0", "same GPU or slot", 625_000),
        Link("holder 1", f"engine {engines[1]} rank 0", "other host", 625_000),
    ]
    last = report.steps[-1]
    report.coverage = [
        Covered(
            engine=name,
            component="model",
            version=last.version,
            num_tensors=24,
            num_frozen=0,
            nbytes=last.bytes,
            route=last.routes[name],
            conversion="cast: 24 tensors from float32 to bfloat16 at the source",
            proof=last.proofs.get(name, ""),
        )
        for name in engines
    ]
    report.spans = {
        "driver": (Span("publish", 1.7e9, 0.010), Span("move", 1.7e9 + 0.012, 0.020)),
        "trainer 0": (Span("publish", 1.7e9 + 0.001, 0.008),),
        f"engine {engines[1]} rank 0": (
            Span("load", 1.7e9 + 0.013, 0.0125),
            Span("verify", 1.7e9 + 0.026, 0.004),
        ),
    }
    return report


def texts(html: str) -> str:
    """What is to be read, without the styles."""
    bare = re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)
    return " ".join(unescape(bare).split())


def test_the_figures_of_the_run_are_on_the_page() -> None:
    text = texts(page(run_report()))
    for said in (
        "quickstart done began",
        "Reward, last 5 steps 0.875 target 0.8; 0.062 at first",
        "Updates verified 15 of 16 11 on all engines; version 17 is the newest",
        "verified on 1 of 2 engines",
        "Update, median 28.5 ms 36 ms the longest",
        "Bytes of an update 1.25 MB 125 MB/s while moving",
        "on 2 GPUs (H200), driven from host-a, 2 CPUs; seed 3",
        "Failures 2 1 heal ",
        "engine component tensors bytes route conversion version verified main-0 model 24 1.25 MB direct "
        "cast: 24 tensors from float32 to bfloat16 at the source 17 live weights",
        "main-1 model 24 1.25 MB broadcast cast: 24 tensors from float32 to bfloat16 at the source 17",
        "Why engines take broadcasts: main-1: sync.mode is broadcast.",
        "main-0: version 2 at",
        "update by update. Publish: trainers make their new weights readable. Pause:",
        "move 28.5 ms 36 ms",
        "engine main-1 rank 0 load 13 ms 12.5 ms",
        "trainer 0 engine main-0 rank 0 same GPU or slot 625 kB",
        "main-1 did not take version 7; the others did main-1 is gone",
        "version 13 had to be tried twice wrong bytes in w",
        "main-1 served version 11 again, 4.50 s after it had failed",
        "600 kB from holder 0 (mapped), 650 kB from holder 1 (tcp); verified",
    ):
        assert said in text


def test_the_mismatch_is_on_the_page_if_engines_gave_log_probabilities() -> None:
    report = run_report(num_steps=3)
    assert "ismatch" not in page(report)
    report.steps[:2] = [replace(row, mismatch=2e-3, mismatch_kl=5e-6) for row in report.steps[:2]]
    html = page(report)
    Elements(html)
    text = texts(html)
    assert "Mismatch How far the trainers' log-probabilities of each step's rollouts were" in text
    assert "step reward mismatch KL version update proof 1 0.333 2.0e-03 5.0e-06 2 21 ms verified" in text
    assert "3 1.000 4 " in text


def test_accepted_drafts_are_on_the_page_of_engines_that_speculate_alone() -> None:
    report = run_report(num_steps=3)
    assert "ccepted" not in page(report)
    for place, share in ((0, 0.125), (2, 0.714)):
        report.steps[place] = replace(report.steps[place], acceptance=share)
    html = page(report)
    Elements(html)
    text = texts(html)
    assert "Accepted drafts Of the tokens that the draft proposed for each step's rollouts" in text
    assert "step reward accepted version update proof 1 0.333 12 % 2 21 ms verified" in text
    assert "2 0.667 3 22 ms verified 3 1.000 71 % 4 " in text
    chart = re.search(r'<svg[^>]*aria-label="Share of the drafted.*?</svg>', html, re.DOTALL)
    assert chart
    assert len(re.findall(r"[\d.]+ [\d.]+", re.search(r'd="M([^"]*)"', chart[0])[1])) == 3, "the last twice"


def test_a_run_that_failed_counts_it_and_says_why() -> None:
    report = run_report()
    report.status, report.error = "failed", "no answer within 60 s from trainer 1"
    text = texts(page(report))
    assert "quickstart failed no answer within 60 s from trainer 1 began" in text
    assert "Failures 3 1 heal " in text


def test_an_engine_that_served_nothing_leaves_a_gap_and_one_that_lagged_has_another_colour() -> None:
    report = run_report()
    report.steps[14] = replace(report.steps[14], engines={"main-0": 16, "main-1": 15})
    chart = re.search(r'<svg[^>]*aria-label="Versions.*?</svg>', page(report), re.DOTALL)
    assert chart
    bars = re.findall(
        r'<rect class="s(\d)" x="([\d.]+)"[^>]*?width="([\d.]+)"[^>]*><title>main-(\d)', chart[0]
    )
    pixels = (336 - 2 - 12) / 16
    found = [
        (engine, colour, round(float(x) / pixels), round(float(w) / pixels)) for colour, x, w, engine in bars
    ]
    assert found == [
        ("0", "0", 0, 16),
        ("1", "0", 0, 5),
        ("1", "0", 9, 5),
        ("1", "1", 14, 1),
        ("1", "0", 15, 1),
    ]


class Elements(HTMLParser):
    """Names and attributes of a page's elements, and those that were not closed in turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_wherever_it_stands(name: str) -> None:
    report = run_report((name, f"{name}2"))
    report.name = name
    html = page(report)
    elements = Elements(html).found
    assert {tag for tag, _ in elements} == {tag for tag, _ in Elements(page(run_report())).found}
    assert "script" not in {tag for tag, _ in elements}
    assert not any(key.startswith("on") or key == "src" for _, attributes in elements for key in attributes)
    assert texts(html).count(name) > 4


def test_a_run_that_came_to_nothing_and_a_report_of_less_have_pages() -> None:
    text = texts(page(RunReport(name="early", seed=0, status="failed", error="trainer 0 is <gone>")))
    assert "early failed trainer 0 is <gone> began" in text
    assert "The run failed: trainer 0 is <gone> No engine failed in an update that committed." in text
    old = run_report()
    old.links, old.spans = [], {}
    old.steps = [replace(row, phases={}, routes={}, failures={}, retried="") for row in old.steps[:1]]
    assert "Reward" in texts(page(old))


def test_a_long_run_and_a_large_fleet_stay_readable() -> None:
    report = run_report(num_steps=2000)
    report.spans = {f"holder {i}": (Span("move", 1.7e9, 0.01 + i / 1e6),) for i in range(1000)}
    html = page(report)
    assert len(html) < 1_000_000
    assert "The 952 ranks that took least are left out." in texts(html)
    assert "holder 999" in html


def test_a_page_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.html: .*no/report\.html"):
        write_page(run_report(), tmp_path / "no" / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with chromium(tmp_path_factory.mktemp("profile")) as port:
        yield port


VISIBLE = "filter(e => e.checkVisibility())"
FITS = "document.documentElement.scrollWidth <= innerWidth"
INSIDE = "[...document.querySelectorAll('section, .facts li')].every(e => e.scrollWidth <= e.clientWidth + 1)"
TEXT = "document.body.innerText"
CHARTS = f"[...document.querySelectorAll('svg')].{VISIBLE}.map(e => e.getAttribute('aria-label'))"
SMALLEST = (
    f"Math.min(...[...document.querySelectorAll('svg text')].{VISIBLE}"
    ".map(e => e.getBoundingClientRect().height))"
)
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize(
    ("width", "dark"), [(400, True), (800, False), (1400, True)], ids=["400-dark", "800-light", "1400-dark"]
)
def test_a_browser_shows_it_without_a_request_a_complaint_or_scrolling_sideways(
    browser: int, tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "report.html"
    report = run_report()
    if dark:  # and names that are out for mischief
        report.engines[SCRIPT] = {"kind": "torch", "why": ""}
        report.steps[-1] = replace(report.steps[-1], engines=dict.fromkeys(HOSTILE, 17))
        report.links += [Link(name, name, "same host", 10**6) for name in HOSTILE]
    write_page(report, path)
    scripts = [FITS, INSIDE, TEXT, CHARTS, SMALLEST, BACKGROUND]
    shown = show(browser, path, scripts, width=width, dark=dark, to=tmp_path / "page.png")
    assert shown.complaints == []
    assert [url for url in shown.requests if not url.startswith(("data:", path.as_uri()))] == []
    assert shown.answers[FITS]
    assert shown.answers[INSIDE]
    assert len(shown.answers[CHARTS]) == len(set(shown.answers[CHARTS])) == 6
    assert shown.answers[SMALLEST] >= 12
    assert shown.answers[BACKGROUND] == ("rgb(20, 23, 26)" if dark else "rgb(246, 246, 243)")
    for figure in ("0.875", "15 of 16", "28.5 ms", "1.25 MB", "main-1 served version 11 again, 4.50 s after"):
        assert figure in shown.answers[TEXT]
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_browser_would_have_told(browser: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<p style='width: 3000px'>x</p><img src='http://127.0.0.1:9/x'><script>console.error(1)</script>"
    )
    shown = show(browser, path, [FITS], width=400, dark=False, to=tmp_path / "bad.png")
    assert shown.answers[FITS] is False
    assert "http://127.0.0.1:9/x" in shown.requests
    assert any("console" in each or "error" in each for each in shown.complaints)
