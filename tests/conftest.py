"""Shared by all tests: no network, no limit per example, GPU tests need GPUs."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from tests.patience import FACTOR, VARIABLE, patient

# They are packages of weightsync: a checkout on the path must not hide an import by their bare names.
sys.modules["actors"] = sys.modules["recipes"] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"
# Torch reads this on import. Tensors of tests are small, and threads that wait for each other use up cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads this on import. By default it would leave a token in the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray starts workers at niceness 15, with which they hardly run on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# A script's shell starts background jobs with SIGINT ignored, which tests of Ctrl-C then wait for in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples share the machine with other processes, so their duration says nothing about our code.
settings.register_profile(
    "default", deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)
# Many runs with other examples find what one run with many would.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=300)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_report_header() -> str:
    return f"patience: every deadline is {FACTOR:g} times as long as it says, set by {VARIABLE}"


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """Give a test its own limit, times the factor."""
    patiently = settings._replace(timeout=patient(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, patiently)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.scheduler import ByFolder

    return ByFolder(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def pytest_collection() -> None:
    """Collect tests without collecting garbage: it would look at all that is imported, again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what is imported and collected out of garbage collections, which look at all of it each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
