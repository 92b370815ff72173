"""Verdicts of `weightsync doctor --cluster` from rows that no cluster gave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.recipes.doctor.cluster_report import ClusterReport, HostFacts, Pair, rounds

VERSIONS = {"python": "3.11.9", "weightsync": "0.1.0", "torch": "2.11.0+cu130", "nccl": "2.28.9", "vllm": ""}


def host(known: str, **values: Any) -> HostFacts:
    number = sum(known.encode())
    made = HostFacts(
        node=f"id-{known}",
        name=known,
        address=f"10.0.0.{number}",
        boot_id=f"boot-{known}",
        versions=VERSIONS,
        gpus=["H200"],
        devices=[f"cuda:{known}"],
        rdma=[],
        refill="zeromq",
        within="CUDA IPC",
        offset_ms=0.0,
        uncertainty_ms=0.1,
        label=f"{known} (10.0.0.{number})",
    )
    return replace(made, **values)


WEST, EAST = host("west"), host("east")
GOOD = Pair(WEST.label, EAST.label, "10.0.0.9:29600", "eth0", "", 0.05, 1.25, "nccl, sockets", "zeromq")


def test_a_good_cluster_has_no_problem() -> None:
    report = ClusterReport([WEST, EAST], [GOOD])
    assert report.problems() == []
    hosts, pairs = report.text().split("\n\n")
    assert hosts.splitlines()[0].split()[:5] == ["host", "python", "weightsync", "torch", "nccl"]
    assert "vllm" not in hosts  # no host has it
    assert "2.11.0+cu130" in hosts
    assert pairs.splitlines()[1].split("  ")[-1] == "zeromq"
    assert "1.25 GB/s" in pairs
    assert "problem" not in report.text()
    assert json.loads(json.dumps(report.as_json()))["pairs"][0]["gb_per_s"] == 1.25


@pytest.mark.parametrize("library", ["weightsync", "torch", "nccl"])
def test_versions_that_differ_are_named_with_their_hosts(library: str) -> None:
    other = host("east", versions=VERSIONS | {library: "9.9.1"})
    (problem,) = ClusterReport([WEST, other], []).problems()
    first = VERSIONS[library].partition("+")[0]
    assert f"{library} differs: {first} on {WEST.label}; 9.9.1 on {other.label}; install one" in problem


@pytest.mark.parametrize(
    "others", [{"torch": "2.11.0+cpu"}, {"nccl": ""}, {"python": "3.12.1"}, {"vllm": "0.32.0"}]
)
def test_what_may_differ_is_no_problem(others: dict[str, str]) -> None:
    assert ClusterReport([WEST, host("east", versions=VERSIONS | others)], []).problems() == []


def test_a_pair_that_is_not_reached_is_named_with_the_address() -> None:
    cut = replace(GOOD, problem="timed out", rtt_ms=None, gb_per_s=None)
    report = ClusterReport([WEST, EAST], [cut])
    (problem,) = report.problems()
    assert f"{WEST.label} does not reach {EAST.label} at 10.0.0.9:29600: timed out" in problem
    assert "firewall" in problem
    assert "interface" in problem
    assert "unreachable" in report.text()
    assert report.text().splitlines()[-1] == f"problem: {problem}"


OFFSETS = st.lists(st.floats(-5000, 5000), min_size=1, max_size=6)


@given(OFFSETS, st.floats(0, 400))
def test_clocks_apart_by_more_than_a_second_are_a_problem(offsets: list[float], doubt: float) -> None:
    hosts = [host(f"h{i}", offset_ms=each, uncertainty_ms=doubt) for i, each in enumerate(offsets)]
    problems = ClusterReport(hosts, []).problems()
    apart = max(offsets) - min(offsets)
    assert len(problems) == (apart - 2 * doubt > 1000)
    for problem in problems:
        fast, slow = (hosts[offsets.index(choose(offsets))].label for choose in (max, min))
        assert f"clock of {fast} is {apart / 1e3:.3f} s ahead of the clock of {slow}" in problem


def test_a_host_whose_clock_is_unknown_is_left_out() -> None:
    assert ClusterReport([WEST, host("east", offset_ms=None)], []).problems() == []


@pytest.mark.parametrize(
    ("values", "ports", "says"),
    [
        ({"free_ports": 5}, (29600, 29699), ""),
        (
            {"free_ports": 4},
            (29600, 29699),
            "4 of 100 are free, and its holders and a driver need 5: stop the processes",
        ),
        (
            {"free_ports": 4},
            (29600, 29603),
            "4 of 4 are free, and its holders and a driver need 5: give a wider",
        ),
        ({"free_ports": 6, "refill": "rdma"}, (29600, 29699), "need 7"),
        ({"free_ports": 8, "devices": ["cuda:a", "cuda:b"]}, (29600, 29699), "need 9"),
        ({"ports_problem": "no such address"}, (29600, 29699), "no such address; give the address of"),
    ],
)
def test_ports_that_do_not_suffice_are_named(
    values: dict[str, Any], ports: tuple[int, int], says: str
) -> None:
    problems = ClusterReport([host("west", **values)], [], ports=ports).problems()
    assert len(problems) == bool(says)
    assert all(says in problem and WEST.label in problem for problem in problems)


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ({"address": WEST.address}, f"address {WEST.address}"),
        ({"devices": WEST.devices}, "GPU cuda:west"),
        ({"name": "west", "boot_id": WEST.boot_id}, "hostname west and boot id"),
        ({"name": "west"}, ""),
        ({"boot_id": WEST.boot_id}, ""),
    ],
)
def test_hosts_that_look_alike_are_named(values: dict[str, Any], shared: str) -> None:
    problems = ClusterReport([WEST, host("east", **values)], []).problems()
    assert len(problems) == bool(shared)
    assert all(f"{WEST.label} and {EAST.label}" in each and f"same {shared}:" in each for each in problems)


def test_slots_of_cpus_may_be_called_alike() -> None:
    assert (
        ClusterReport([host("west", devices=["slot:0"]), host("east", devices=["slot:0"])], []).problems()
        == []
    )


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        ("facts: no answer within 10 s from east (10.0.0.2)", "--timeout"),
        (
            "east (10.0.0.2) is gone: No module named 'weightsync'",
            "install",
        ),
        ("east (10.0.0.2) is gone: its node died", "ray list nodes"),
    ],
)
def test_a_host_that_does_not_answer_is_named_and_the_others_are_shown(failure: str, remedy: str) -> None:
    report = ClusterReport([WEST], [], {"east (10.0.0.2)": failure})
    (problem,) = report.problems()
    assert problem.startswith(failure)
    assert remedy in problem
    assert WEST.label in report.text()
    assert ClusterReport([], [], report.failures).text() == f"problem: {problem}"


@given(st.integers(0, 17))
def test_no_host_is_in_two_measurements_at_once(num_hosts: int) -> None:
    hosts = [f"h{i}" for i in range(num_hosts)]
    made = [*rounds(hosts)]
    assert sorted(pair for each in made for pair in each) == sorted(permutations(hosts, 2))
    for each in made:
        busy = [name for pair in each for name in pair]
        assert len(set(busy)) == len(busy)
    assert len(made) <= 2 * num_hosts
