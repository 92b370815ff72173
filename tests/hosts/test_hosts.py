"""Hosts with networks of their own, on this machine: bytes cross links, and links are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.network import SUBNET, SUBNET_6
from tests.patience import patient
from weightsync.readers.mooncake_process import probe

UNSHARE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return why this machine cannot have such hosts, or ""."""
    if os.geteuid():
        return "needs root, for network namespaces"
    hidden = next((path for path in (ROOT, Path(sys.executable)) if path.is_relative_to("/tmp")), None)
    if hidden:
        return f"each host has a /tmp of its own, and would not see {hidden}"
    command = [*UNSHARE, "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(10), check=False)
    except OSError as error:
        return f"needs util-linux and iproute2: {error}"
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.hosts
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scenario",
    [
        "broadcast",
        "staged",
        "doctor",
        "two_addresses",
        "direct",
        "live_sources",
        "encrypted",
        "host_copies",
        "lost_links",
        "hasty_ray",
        "quickstart_loop",
        "servers",
        "deltas",
    ],
)
def test_several_hosts(scenario: str) -> None:
    _run("tests.hosts.lab", scenario)


@pytest.mark.hosts
@pytest.mark.timeout(400)
@pytest.mark.parametrize("astray", [[], ["astray"]], ids=["", "with an interface that leads nowhere"])
@pytest.mark.parametrize("subnet", [SUBNET, SUBNET_6], ids=["IPv4", "IPv6 alone"])
def test_two_hosts_meet_by_the_route_between_them(subnet: str, astray: list[str]) -> None:
    """Their hostnames lead nowhere. Their boot id is one, and ids of processes and descriptors are alike."""
    said = _run("tests.hosts.pair", subnet, *astray)
    assert f"read over zeromq from tcp://{'[' * (':' in subnet)}{subnet}1" in said


@pytest.mark.hosts
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("protocol", "times"), [("zeromq", 2.5), ("tcp", 2.0)])
def test_a_newcomer_reads_faster_from_three_hosts_than_from_one(protocol: str, times: float) -> None:
    if protocol == "tcp":
        _need_mooncake()
    said = _run("tests.hosts.sources", protocol)
    assert float(said.split(" times")[0].split()[-1]) >= times, said


@pytest.mark.hosts
@pytest.mark.timeout(400)
def test_with_mooncake_a_killed_reader_a_killed_source_and_late_bytes_harm_nobody() -> None:
    _need_mooncake()
    _run("tests.hosts.mooncake_reads")


def _need_mooncake() -> None:
    if reason := probe("tcp", ""):
        pytest.skip(reason)


def _run(*command: str) -> str:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(380),
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
