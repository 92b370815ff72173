"""What adapters make sure of before they start their engines."""

from __future__ import annotations

import logging

import pytest

from weightsync.engines import checks
from weightsync.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("0.24.0", False),
        ("0.24.0+cu130", False),
        ("0.32.1", False),
        ("0.23.9", True),
        ("0.33.0", True),
        ("1.0", True),
        ("", False),
    ],
)
def test_a_version_outside_the_tested_range_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warns: bool
) -> None:
    monkeypatch.setattr(checks, "_TESTED", {"vllm": ("0.24", "0.32")})
    monkeypatch.setattr(checks, "installed", lambda kind: (kind, version))
    with caplog.at_level(logging.WARNING):
        checks.warn_untested("vllm")
    told = f"vllm {version} is installed, and weightsync is tested with 0.24 to 0.32"
    assert [(each.name, each.getMessage()) for each in caplog.records] == (
        [("weightsync.engines.vllm", told)] if warns else []
    )


def test_one_tested_version_and_its_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_TESTED", {"sglang": ("0.5.17", "0.5.17")})
    found = {"0.5.17": "", "0.5.17.post1": "", "0.5.16": "0.5.16", "0.5.23": "0.5.23", "0.6": "0.6"}
    for version, named in found.items():
        monkeypatch.setattr(checks, "installed", lambda kind, version=version: (kind, version))
        said = checks.untested("sglang")
        assert said == (f"sglang {named} is installed, and weightsync is tested with 0.5.17" if named else "")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    checks.require_gpus(2)
    with pytest.raises(ConfigError, match=r"options\.tensor_parallel_size.*sees 2 GPUs"):
        checks.require_gpus(4)
