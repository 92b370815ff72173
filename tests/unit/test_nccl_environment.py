"""What NCCL is told by default."""

from __future__ import annotations

import os
import platform

import pytest

from weightsync.transports.nccl import NcclTransport


@pytest.mark.parametrize(
    ("machine", "told", "found"),
    [("x86_64", None, "0"), ("x86_64", "1", "1"), ("aarch64", None, None), ("aarch64", "0", "0")],
)
def test_cumem_is_for_hosts_that_nvlink_connects_and_for_who_wants_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, told: str | None, found: str | None
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", told or "")
    if told is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    NcclTransport()
    assert os.environ.get("NCCL_CUMEM_ENABLE") == found
