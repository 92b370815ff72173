"""Faults on purpose: what a plan may say, and what each action does to a process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import patient
from weightsync import faults
from weightsync.errors import ConfigError
from weightsync.faults import LINK_DOWN, inject, set_faults
from weightsync.testing import Fault, FaultPlan

VICTIM = "engine main-0"
KILL = {"process": VICTIM, "action": "kill", "at": "move"}


def fault(**changes: Any) -> Fault:
    return Fault(**{"process": VICTIM, "action": "drop", "at": "move"} | changes)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    set_faults(VICTIM, (), 0)


def test_a_plan_reads_from_a_file_as_it_is_built_in_python(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "seed: 3\n"
        "faults:\n"
        "  - {process: engine main-0, action: kill, at: move, bucket: middle, version: 8}\n"
        "  - {process: holder 1, action: slow, at: refill, bucket: 3, seconds: 2, times: 4}\n",
        encoding="utf-8",
    )
    kill = Fault(process="engine main-0", action="kill", at="move", bucket="middle", version=8)
    slow = Fault(process="holder 1", action="slow", at="refill", bucket=3, seconds=2.0, times=4)
    plan = FaultPlan.from_yaml(path)
    assert plan == FaultPlan((kill, slow), seed=3)
    assert plan.for_("holder 1") == (slow,)
    assert plan.for_("holder 2") == ()
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"action": "kil"}, "action", "did you mean 'kill'? valid: corrupt, drop, error"),
        ({"at": "moving"}, "at", "did you mean 'move'?"),
        ({"when": 3}, "when", "the key is unknown"),
        ({"process": "main-0"}, "process", "engine NAME"),
        ({"process": "holder one"}, "process", "holder 0"),
        ({"process": "trainer 0"}, "at", "trainer 0 is not there; valid: idle, publish"),
        ({"process": "engine e0", "at": "publish"}, "at", "engine e0 is not there"),
        ({"process": "holder 0", "at": "pause"}, "at", "holder 0 is not there"),
        ({"at": "idle", "action": "slow"}, "action", "give kill, hang or link_down"),
        ({"at": "idle", "version": 3}, "version", "leave it out"),
        ({"at": "commit", "bucket": 3}, "bucket", "leave it out"),
        ({"bucket": "frist"}, "bucket", "did you mean 'first'?"),
        ({"bucket": 1.5}, "bucket", "give a whole number"),
        ({"bucket": -1}, "bucket", "at least 0"),
        ({"version": 0}, "version", "at least 1"),
        ({"rank": -1}, "rank", "at least 0"),
        ({"rank": 0, "at": "commit"}, "rank", "no rank is at commit"),
        ({"rank": 0, "process": "holder 0"}, "rank", "holder 0 has none"),
        ({"times": 0}, "times", "at least 1"),
        ({"link": "west"}, "link", "kill cuts none: leave it out"),
        ({"link": "", "action": "link_down"}, "link", "name a link"),
        ({"seconds": 0}, "seconds", "more than 0"),
        ({"seconds": float("inf")}, "seconds", "finite"),
    ],
)
def test_a_mistake_is_refused_by_its_place_in_the_plan(
    change: dict[str, object], field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan.from_dict({"faults": [KILL, KILL | change]})
    assert caught.value.field == f"chaos.faults[1].{field}"
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "chaos.faults"),
        ([KILL], "chaos"),
        ({"faults": [KILL], "sead": 1}, "chaos.sead"),
        ({"faults": KILL}, "chaos.faults"),
        ({"faults": [{"process": VICTIM, "at": "move"}]}, "chaos.faults[0].action"),
    ],
)
def test_a_plan_that_is_none_is_refused(data: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan.from_dict(data)
    assert caught.value.field == field


def test_a_plan_built_in_python_is_held_to_the_same() -> None:
    with pytest.raises(ConfigError, match=r"^chaos\.faults\[0\]\.times: 0 is not valid"):
        FaultPlan((fault(times=0),))


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("faults: [", encoding="utf-8")
    for path in (tmp_path / "none.yaml", tmp_path / "bad.yaml"):
        with pytest.raises(ConfigError) as caught:
            FaultPlan.from_yaml(path)
        assert caught.value.value == str(path)
        assert "\n" not in str(caught.value)


def test_an_engines_faults_are_shared_out_among_its_processes() -> None:
    move, second = fault(), fault(rank=1)
    pause, idle = fault(at="pause"), fault(at="idle", action="kill")
    rank_idle = fault(at="idle", action="kill", rank=1)
    everything = (move, second, pause, idle, rank_idle)
    assert faults.split_by_rank(everything, 2) == ((pause, idle), ((move,), (second, rank_idle)))
    assert faults.split_by_rank((move, pause, idle), 1) == ((move, pause, idle), ((),))
    with pytest.raises(ConfigError, match="engine main-0 has ranks 0 to 1"):
        faults.split_by_rank([fault(rank=2)], 2)


def test_a_victim_that_nobody_is_called_is_told_the_names() -> None:
    plan = FaultPlan((fault(), fault(process="engine main-9")))
    plan.check_processes(["engine main-0", "engine main-9"])
    with pytest.raises(ConfigError) as caught:
        plan.check_processes(["engine main-0", "holder 0"])
    assert caught.value.field == "chaos.faults[1].process"
    assert caught.value.remedy.endswith("valid: engine main-0, holder 0")


def rearm(process: str, faults: list[Fault], seed: int) -> None:
    """With these alone."""
    set_faults(process, (), seed)
    set_faults(process, faults, seed)


def test_nothing_strikes_where_nothing_is_armed() -> None:
    assert not inject("move", bucket=0, num_buckets=1, version=1)


def test_a_message_is_dropped_as_often_as_asked() -> None:
    rearm(VICTIM, [fault(at="commit", times=2)], 0)
    assert not inject("pause", version=1)
    assert [inject("commit", version=version) for version in (1, 2, 3)] == [True, True, False]


def test_a_fault_of_one_version_waits_for_it() -> None:
    rearm(VICTIM, [fault(version=8)], 0)
    assert [inject("move", bucket=0, num_buckets=2, version=v) for v in (0, 7, 8, 8)] == [0, 0, 1, 0]


@given(num_buckets=st.integers(1, 9), wanted=st.sampled_from(["first", "middle", "last", 0, 3, None]))
def test_a_fault_strikes_in_its_bucket_once(num_buckets: int, wanted: Any) -> None:
    rearm(VICTIM, [fault(bucket=wanted)], 0)
    hit = [bucket for bucket in range(num_buckets) if inject("move", bucket=bucket, num_buckets=num_buckets)]
    named = {"first": 0, "middle": num_buckets // 2, "last": num_buckets - 1, None: 0}
    bucket = named.get(wanted, wanted)
    assert hit == ([bucket] if bucket < num_buckets else [])


@pytest.mark.parametrize("bucket", ["first", "middle", "last", 0])
def test_a_fault_in_a_bucket_does_not_strike_where_there_is_none(bucket: Any) -> None:
    rearm(VICTIM, [fault(bucket=bucket)], 0)
    assert not inject("move", version=1)


def test_what_is_armed_later_strikes_beside_what_was_armed_before() -> None:
    rearm(VICTIM, [fault(at="pause", times=2)], 0)
    assert inject("pause")
    set_faults(VICTIM, [fault(at="commit")], 0)
    assert [inject("pause"), inject("pause"), inject("commit")] == [True, False, True]


def test_arming_with_nothing_disarms() -> None:
    rearm(VICTIM, [fault(at="pause")], 0)
    set_faults(VICTIM, [], 0)
    assert faults.active is None
    assert not inject("pause")


def test_all_that_is_due_strikes_at_once() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    rearm(VICTIM, [fault(), fault(action="corrupt")], 0)
    assert inject("move", data=data)
    assert data.any()


def test_an_error_names_its_victim_and_its_place() -> None:
    rearm(VICTIM, [fault(action="error", at="verify")], 0)
    with pytest.raises(RuntimeError, match="injected into engine main-0 at verify"):
        inject("verify")
    assert not inject("verify")


def test_a_link_is_cut_by_the_command_of_a_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    monkeypatch.setenv(LINK_DOWN, f"sh -c 'echo $0 $1 >> {said}'")
    rearm(VICTIM, [fault(action="link_down", seconds=2.5, times=2), fault(action="link_down", link="a/b")], 0)
    assert not inject("move")
    assert not inject("move")
    own = f"{socket.gethostname()} 2.5"
    assert sorted(said.read_text().splitlines()) == sorted([own, own, "a/b 1.0"])


@pytest.mark.parametrize("command", ["false", "/nowhere/cut"])
def test_a_harness_that_cuts_no_link_is_an_error(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv(LINK_DOWN, command)
    rearm(VICTIM, [fault(action="link_down", link="west")], 0)
    with pytest.raises(RuntimeError, match="the harness did not cut link west"):
        inject("move")


@pytest.mark.parametrize("command", [None, " "])
def test_a_link_is_not_cut_without_a_harness(monkeypatch: pytest.MonkeyPatch, command: str | None) -> None:
    monkeypatch.delenv(LINK_DOWN, raising=False)
    if command:
        monkeypatch.setenv(LINK_DOWN, command)
    plan = FaultPlan((fault(), fault(action="link_down")))
    with pytest.raises(ConfigError, match=LINK_DOWN) as caught:
        plan.check_processes([VICTIM])
    assert (caught.value.field, caught.value.value) == ("chaos.faults[1].action", "link_down")
    with pytest.raises(ConfigError, match=LINK_DOWN):
        set_faults(VICTIM, plan.faults, 0)
    assert faults.active is None


def test_slow_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rearm(VICTIM, [fault(action="slow", seconds=2.5)], 0)
    assert not inject("move")
    assert slept == [2.5]


@given(
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    shape=st.lists(st.integers(1, 4), max_size=3),
)
def test_corruption_flips_one_bit_and_the_same_one_for_the_same_seed(
    seed: int, dtype: torch.dtype, shape: list[int]
) -> None:
    def corrupted() -> torch.Tensor:
        data = torch.zeros(shape, dtype=dtype)
        rearm(VICTIM, [fault(action="corrupt")], seed)
        assert not inject("move", data=data)
        return data.view(-1).view(torch.uint8)

    first, second = corrupted(), corrupted()
    assert sum(int(byte).bit_count() for byte in first) == 1
    assert torch.equal(first, second)


def test_seeds_and_victims_differ_in_what_they_corrupt() -> None:
    def spot(process: str, seed: int) -> int:
        data = torch.zeros(1 << 16, dtype=torch.uint8)
        rearm(process, [fault(action="corrupt")], seed)
        inject("move", data=data)
        return int(data.nonzero())

    spots = {spot(process, seed) for process in ("engine main-0", "engine main-1") for seed in range(8)}
    assert len(spots) > 12


def test_corruption_waits_for_data() -> None:
    rearm(VICTIM, [fault(action="corrupt")], 0)
    inject("move")
    inject("move", data=torch.zeros(0))
    data = torch.zeros(1)
    inject("move", data=data)
    assert data.view(torch.uint8).any()


def test_threads_share_what_is_left() -> None:
    rearm(VICTIM, [fault(times=100)], 0)
    with ThreadPoolExecutor(8) as pool:
        struck = list(pool.map(lambda _: inject("move"), range(1000)))
    assert sum(struck) == 100


def test_who_is_slow_holds_no_other_thread_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, wake = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        asleep.set()
        wake.wait(patient(30))

    monkeypatch.setattr(time, "sleep", sleep)
    rearm(VICTIM, [fault(action="slow"), fault(at="commit")], 0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(inject, "move")
        assert asleep.wait(patient(30))
        assert inject("commit")
        wake.set()
        assert slow.result(patient(30)) is False


def test_a_fault_at_idle_strikes_after_the_call_unless_disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[_Timer] = []

    class _Timer:
        def __init__(self, seconds: float, function: Any, args: tuple[object, ...]) -> None:
            self.seconds, self.function, self.args = seconds, function, args
            self.daemon = self.started = self.cancelled = False
            timers.append(self)

        def start(self) -> None:
            self.started = True

        def cancel(self) -> None:
            self.cancelled = True

    monkeypatch.setattr(threading, "Timer", _Timer)
    ended: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    rearm(VICTIM, [fault(action="kill", at="idle")], 0)
    assert (timers[0].started, timers[0].daemon, ended) == (True, True, [])
    assert timers[0].seconds > 0
    rearm(VICTIM, [fault(action="kill", at="idle"), fault()], 0)
    assert timers[0].cancelled
    timers[1].function(*timers[1].args)
    assert ended == [signal.SIGKILL]
    rearm(VICTIM, [fault()], 0)
    assert len(timers) == 2


def _victim(code: str) -> subprocess.Popen[bytes]:
    code = f"import sys\nfrom weightsync.faults import Fault, inject, set_faults\n{code}\nsys.stdin.read()\n"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for victim in started:
        victim.kill()
        victim.communicate()


@pytest.mark.parametrize("at", ["idle", "move"])
def test_a_killed_process_is_gone_without_a_word(victims: list[subprocess.Popen[bytes]], at: str) -> None:
    victims.append(
        _victim(
            f"set_faults('engine e', [Fault(process='engine e', action='kill', at={at!r})], 0)\n"
            "inject('move')"
        )
    )
    assert victims[0].wait(patient(60)) == -signal.SIGKILL


@pytest.mark.parametrize("at", ["idle", "move"])
def test_a_hung_process_stops_with_all_its_threads(victims: list[subprocess.Popen[bytes]], at: str) -> None:
    victims.append(
        _victim(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            f"set_faults('engine e', [Fault(process='engine e', action='hang', at={at!r})], 0)\n"
            "inject('move')"
        )
    )
    pid = victims[0].pid
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    assert len(threads) >= 2
    assert {(thread / "stat").read_text().rsplit(")")[1].split()[0] for thread in threads} == {"T"}
    victims[0].send_signal(signal.SIGCONT)
    victims[0].communicate(timeout=patient(60))
    assert victims[0].returncode == 0


def test_the_module_imports_neither_torch_nor_yaml() -> None:
    code = "import sys, weightsync.faults; print(*{'torch', 'yaml', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_places_are_those_that_a_fault_may_name() -> None:
    for role, places in faults._PLACES.items():
        for at in places:
            number = "0" if role != "engine" else "main-0"
            FaultPlan((fault(process=f"{role} {number}", at=at, action="kill"),))
