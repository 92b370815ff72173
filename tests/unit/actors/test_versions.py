"""Versions of processes on several hosts."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch

import weightsync
from weightsync.actors.ray.placement import Placement, check_versions
from weightsync.actors.ray.versions import own_versions
from weightsync.errors import PlanError

SAME = {"weightsync": "0.1.0", "torch": "2.11.0+cu130", "nccl": "2.28.9"}


def at(host: int, device: str = "cuda:a", **versions: str) -> Placement:
    return Placement(f"node-{host}", f"10.0.0.{host}", device, 1, SAME | versions)


def test_a_process_knows_its_own() -> None:
    found = own_versions()
    assert (found["weightsync"], found["torch"]) == (weightsync.__version__, torch.__version__)
    assert bool(found["nccl"]) == bool(torch.version.cuda)


def differing(library: str) -> tuple[Mapping[str, list[Placement]], str]:
    """Return ranks that differ, and what names them."""
    one = SAME[library].partition("+")[0]
    return {"trainer 0": [at(1)], "engine e0": [at(1), at(2, **{library: "9.9.1"})]}, (
        f"engine e0 on host 10.0.0.2: it has {library} 9.9.1, and trainer 0 on host 10.0.0.1 has {one}: "
        "install one version on all hosts"
    )


def test_two_versions_of_ours_are_refused_with_their_processes_and_hosts() -> None:
    ranks, named = differing("weightsync")
    with pytest.raises(PlanError) as raised:
        check_versions(ranks)
    assert str(pickle.loads(pickle.dumps(raised.value))) == named


@pytest.mark.parametrize("library", ["torch", "nccl"])
def test_two_versions_of_libraries_are_logged(library: str, caplog: pytest.LogCaptureFixture) -> None:
    ranks, named = differing(library)
    check_versions(ranks)
    assert [record.getMessage() for record in caplog.records] == [f"[driver] {named}"]


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"trainer 0": [at(1)], "engine e0": [at(2)]},
        {"trainer 0": [at(1)], "engine e0": [at(1, torch="9.9.1")]},
        {"trainer 0": [at(1)], "engine e0": [at(2, torch="2.11.0+cpu")]},
        {"trainer 0": [at(1)], "engine e0": [at(2, nccl="")]},
        {"trainer 0": [at(1)], "engine e0": [at(2, "slot:0", nccl="2.20.1")]},
        {"trainer 0": [Placement("a", "10.0.0.1", "slot:0", 1)], "engine e0": [at(2)]},
    ],
    ids=["nobody", "alike", "one host", "another build", "no NCCL", "NCCL is not used", "unknown"],
)
def test_what_may_differ_is_accepted(
    ranks: Mapping[str, list[Placement]], caplog: pytest.LogCaptureFixture
) -> None:
    check_versions(ranks)
    assert not caplog.records
