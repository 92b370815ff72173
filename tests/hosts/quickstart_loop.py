"""The quickstart's loop with its engines spread over three hosts, as a job that a fourth host submits.

The job is ``python -m tests.hosts.quickstart_loop FOLDER``: the recipe's own loop, with a screen that
compares tokens and reads the counters of the links after each step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

import weightsync
from tests.hosts.network import JOBS_PORT, SUBNET
from tests.hosts.outside import ask, say
from tests.patience import patient
from weightsync.recipes.cluster import local_cluster
from weightsync.recipes.inputs import runnable_recipe
from weightsync.recipes.report.run_folder import RunFolder
from weightsync.recipes.report.run_report import RunReport, StepRow, read_report
from weightsync.recipes.report.screen import Screen

ROOT = Path(__file__).parents[2]
HOSTS = {"head": "main-0", "west": "main-1", "east": "main-2"}
"""The engine that each host has at first. The trainer and the driver are on the head."""
FAR = ("west", "east")
MBIT_PER_S = 1000
TIMEOUT_S = patient(2.5)
SETTINGS: dict[str, Any] = {
    "trainers.count": 1,
    "engines.main.count": len(HOSTS),
    "engines.main.kind": "vllm",
    "model.hidden_size": 256,
    "model.intermediate_size": 512,
    "resume": "true",  # so that its actors have names
    "sync.timeout_s": TIMEOUT_S,
    "sync.heartbeat_s": patient(0.75),
    "sync.ports": "29600-29699",
    "loop.prompts_per_step": 48,
    "loop.learning_rate": 0.0005,  # that of the recipe is for a smaller model
    "loop.steps": 64,
}
QUIET_STEPS = 8
LAST_STEPS = SETTINGS["loop.steps"] - QUIET_STEPS
"""The step after which the loop waits until nothing more is going to fail."""
PACE_S = 2.0
"""The least that a step takes."""
FOREVER_S = 3600.0
_STILL_NBYTES = 64 << 10
"""What a link may carry in a fifth of a second while no version crosses it."""
DONE, NAME = "done", "quickstart-loop"
PROMPTS = tuple((12, 2 + left, 2 + right, 13) for left in range(10) for right in range(0, 10, 3))


@dataclass(frozen=True)
class Observed:
    """What the job saw after a step.

    Attributes:
        received: bytes that each host had received by then.
        tokens: greedy tokens of the trainer and of each engine that took the step's version.
        silent: engines that took it, and did not answer.
        places: the host on which each of these engines ran, and its process there.
    """

    step: int
    version: int
    received: Mapping[str, int]
    tokens: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def hosts(self) -> dict[str, str]:
        """The host of each engine that answered."""
        return {name: host for name, (host, _) in self.places.items()}


class Observer(Screen):
    """A screen that notes after each step what engines say and what has crossed the links."""

    def __init__(self, run: str, folder: Path) -> None:
        super().__init__(Console())
        self._run, self._file = run, folder / "observed.jsonl"
        self._next = 0.0

    def step(self, row: StepRow, num_steps: int) -> None:
        super().step(row, num_steps)
        took = [name for name, version in row.engines.items() if version == row.version]
        tokens, silent, places = self._sample(took, row.version)
        seen = Observed(row.step, row.version, _settled(), tokens, silent, places)
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(seen)) + "\n")
        deadline = time.monotonic() + patient(120)
        while row.step == LAST_STEPS and not self._file.with_name(DONE).exists():
            assert time.monotonic() < deadline, "the scenario did not end"
            time.sleep(0.1)  # no event crosses the hosts
        time.sleep(max(0.0, self._next - time.monotonic()))  # so that quick machines have steps left
        self._next = time.monotonic() + PACE_S

    def _sample(
        self, took: Sequence[str], version: int
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, int]]]:
        from weightsync.actors.holders.detached import actor_name, find
        from weightsync.recipes.fleet.calls import collect, gather

        trainer, engines = find(actor_name(self._run, "trainer 0")), {}
        for name in took:
            if engine := find(actor_name(self._run, f"engine {name}")):
                engines[name] = engine
        assert trainer
        sampling = {"max_tokens": 1, "temperature": 0.0}
        calls = {name: engine.generate.remote(PROMPTS, sampling) for name, engine in engines.items()}
        tokens = collect({"trainer": trainer.greedy.remote(PROMPTS, 1)}, "greedy", TIMEOUT_S)
        outcome = gather(calls, "generate", TIMEOUT_S)
        for name, rollout in outcome.answers.items():
            assert rollout.version == version, (name, rollout.version, version)
            tokens[name] = [list(each) for each in rollout.tokens]
        asked = {name: engines[name].__ray_call__.remote(_place) for name in outcome.answers}
        places = gather(asked, "place", TIMEOUT_S).answers
        return tokens, {name: str(error) for name, error in outcome.failures.items()}, dict(places)


def _place(_: object) -> tuple[str, int]:
    """Return the name of this host, and this process's id on it."""
    return Path("/proc/sys/kernel/hostname").read_text().strip(), os.getpid()


def _received() -> dict[str, int]:
    """The bytes that each host has received, by the far ends of the links, which all hosts see."""
    found = {}
    for host in HOSTS:
        counter = Path(f"/sys/class/net/{host}/statistics/tx_bytes")
        found[host] = int(counter.read_text()) if counter.exists() else 0
    return found


def _settled() -> dict[str, int]:
    """Return what hosts have received once the version's copy is there, too."""
    deadline, before = time.monotonic() + TIMEOUT_S, _received()
    while time.monotonic() < deadline:
        time.sleep(0.2)  # the kernel has no event for it
        now = _received()
        if all(now[host] - before[host] < _STILL_NBYTES for host in FAR):
            return now
        before = now
    return before


def main(folder: str) -> None:
    """Run the loop, as the command does."""
    assert "runtime_resources" in weightsync.__file__, "this is not what the job brought"
    overrides = [f"{key}={value}" for key, value in SETTINGS.items()]
    recipe, at = runnable_recipe("quickstart", overrides), RunFolder(Path(folder))
    with local_cluster(at, threads_per_actor=1):
        from weightsync.recipes.loops.quickstart import run  # as weightsync.recipes.cli does

        report = run(recipe, at, Observer(recipe.name, at.path))
    assert report.status == "done", (report.status, report.final_reward)


class Job:
    """The job, followed by the files that it writes."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def report(self) -> RunReport:
        """Return what it has written so far."""
        return read_report(self._folder / "report.json")

    def observed(self) -> list[Observed]:
        """Return what it has seen after each step."""
        path = self._folder / "observed.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [msgspec.json.decode(line, type=Observed) for line in lines if line.endswith("\n")]

    def wait(self, what: str, until: Callable[[Sequence[Observed]], bool], seconds: float) -> list[Observed]:
        """Wait until the steps so far are as `until` says."""
        deadline = time.monotonic() + seconds
        while not until(seen := self.observed()):
            assert self._process.poll() is None, f"the job ended before {what}"
            assert time.monotonic() < deadline, f"{what}: not after step {len(seen)}: {seen[-1:]}"
            time.sleep(0.1)  # no event crosses the hosts
        return seen

    def finish(self) -> None:
        """Let it end, and wait until it has succeeded."""
        (self._folder / DONE).touch()
        assert self._process.wait(patient(120)) == 0


@contextmanager
def submitted() -> Iterator[Job]:
    """Submit the job from this host."""
    with tempfile.TemporaryDirectory(prefix="weightsync-loop-", dir="/var/tmp") as folder:
        shipped = json.dumps({"py_modules": [str(ROOT / "weightsync")], "working_dir": folder})
        options = ["--submission-id", NAME, "--runtime-env-json", shipped]
        run = [sys.executable, "-m", "tests.hosts.quickstart_loop", folder]
        with subprocess.Popen(_ray_job("submit", *options, "--", *run)) as process:
            try:
                yield Job(process, Path(folder))
            finally:
                if process.poll() is None:
                    subprocess.run(_ray_job("stop", NAME), timeout=patient(30), check=True)
                    process.kill()


def _ray_job(what: str, *arguments: str) -> list[str]:
    at = f"http://{SUBNET}1:{JOBS_PORT}"
    return [sys.executable, "-m", "ray.scripts.scripts", "job", what, "--address", at, *arguments]


def check_tokens(seen: Sequence[Observed]) -> None:
    """Check that each engine that took a version says what its trainer says."""
    for each in seen:
        wrong = [name for name, tokens in each.tokens.items() if tokens != each.tokens["trainer"]]
        assert not wrong, (each.step, wrong, each.tokens)


def check_links(nbytes: int, seen: Sequence[Observed]) -> None:
    """Check the bytes on each link, in the steps after the first of `seen`.

    Each version crosses once to each host without a trainer, and once more to the one that keeps its copy.
    """
    steps, times = len(seen) - 1, dict[str, float]()
    assert steps > 0
    for host in FAR:
        crossed = seen[-1].received[host] - seen[0].received[host]
        times[host] = crossed / (nbytes * steps)
        say(f"{host}: {steps} updates of {nbytes} bytes, {crossed} crossed: {times[host]:.3f} each")
    for planned, found in zip((1, 2), sorted(times.values()), strict=True):
        assert abs(found / planned - 1) < 0.05, times


def took(engine: str, on: Collection[str] = tuple(HOSTS)) -> Callable[[Sequence[Observed]], bool]:
    """Whether an engine took the last version, on one of these hosts."""
    return lambda seen: bool(seen) and seen[-1].hosts.get(engine, "") in on


def check_versions(rows: Sequence[StepRow], quiet: Collection[int]) -> None:
    """Check that rollouts were made by the newest version alone, and that all took each of `quiet`."""
    for row in rows:
        assert row.verified, row
        assert row.rollout_versions == [row.version - 1], row
        if row.step in quiet:
            assert row.engines == dict.fromkeys(HOSTS.values(), row.version), row


def lose_link(job: Job, host: str) -> None:
    """Cut a host's link until two steps have gone on without it. Then its engine joins again, as it was."""
    engine, seen = HOSTS[host], job.observed()
    before, place = len(seen), seen[-1].places[HOSTS[host]]
    ask("cut", host, FOREVER_S)
    began = time.monotonic()

    def without(seen: Sequence[Observed]) -> bool:
        return len(seen) > before + 1 and not any(engine in each.hosts for each in seen[-2:])

    job.wait(f"two steps without {host}", without, patient(15))
    say(f"link of {host}: two steps without it after {time.monotonic() - began:.1f} s")
    ask("mend", host)
    began = time.monotonic()
    seen = job.wait(f"{engine} is back", took(engine, [host]), patient(45))
    assert seen[-1].places[engine] == place, "it did not keep its process"
    say(f"link of {host}: {engine} took a version {time.monotonic() - began:.1f} s after it was back")


def lose_host(job: Job, host: str) -> None:
    """Kill all of a host. Its engine starts on another, and again on the host once that is back."""
    engine = HOSTS[host]
    ask("crash", host)
    began = time.monotonic()
    others = {*HOSTS} - {host}
    seen = job.wait(f"{engine} is on another host", took(engine, others), patient(45))
    say(f"{host} killed: {engine} took a version on another host after {time.monotonic() - began:.1f} s")
    ask("boot", host)
    limit(host)
    ask("ray", host)
    say(f"{host} is back")
    began = time.monotonic()
    ask("kill", *seen[-1].places[engine])
    job.wait(f"{engine} is on {host} again", took(engine, [host]), patient(45))
    say(f"{engine} killed: it took a version on {host} after {time.monotonic() - began:.1f} s")


def quickstart_loop() -> None:
    """Run the loop; cut a link, kill a host and have both back while it goes on."""
    for host in HOSTS:
        limit(host)
    with submitted() as job:
        seen = job.wait("the first steps", lambda seen: len(seen) > QUIET_STEPS, patient(60))
        assert {name: host for host, name in HOSTS.items()} == seen[-1].hosts
        lose_link(job, "west")
        lose_host(job, "west")
        assert len(job.observed()) < LAST_STEPS, "the loop had no step left for the faults"
        job.finish()
        report, seen = job.report(), job.observed()
    quiet = seen[: QUIET_STEPS + 1], seen[LAST_STEPS:]
    for each in seen:
        say(f"step {each.step}: version {each.version}, {dict(each.hosts)}, {each.silent or ''}")
    for heal in report.heals:
        say(heal)
    check_tokens(seen)
    check_versions(report.steps, {each.step for steps in quiet for each in steps})
    for steps in quiet:
        assert all({*each.tokens} == {"trainer", *HOSTS.values()} for each in steps)
        check_links(report.steps[0].bytes, steps)
    say(f"reward {report.first_reward:.3f} to {report.final_reward:.3f}, {report.num_verified} verified")


def limit(host: str) -> None:
    """Have a host's link carry a gigabit per second each way."""
    ask("rate", host, MBIT_PER_S)
    ask("sending_rate", host, MBIT_PER_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
