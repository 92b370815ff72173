"""The environment variables that vLLM gets before it is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from weightsync.engines.vllm.api import set_environment

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that makes a host with these packages, and these programs in PATH."""
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})

    def has(packages: tuple[str, ...], *programs: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
        for program in programs:
            path = tmp_path / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o755)

    return has


def test_vllm_samples_without_flashinfer_if_it_is_not_installed(host) -> None:
    host((), "nvcc", "ninja")
    set_environment()
    assert os.environ[SAMPLER] == "0"


@pytest.mark.parametrize("programs", [(), ("cuda/bin/nvcc",), ("ninja",), ("nvcc", "ninja")])
def test_vllm_samples_without_flashinfer_if_it_cannot_compile(
    host, tmp_path: Path, programs: tuple[str, ...]
) -> None:
    """FlashInfer looks into `CUDA_HOME`, if it is set, and nowhere else."""
    host(("flashinfer",), *programs)
    os.environ["CUDA_HOME"] = str(tmp_path / "cuda")
    set_environment()
    assert os.environ[SAMPLER] == "0"


@pytest.mark.parametrize("variable", ["", "CUDA_HOME", "CUDA_PATH"])
def test_vllm_samples_with_flashinfer_if_it_can_compile(host, tmp_path: Path, variable: str) -> None:
    host(("flashinfer",), "cuda/bin/nvcc" if variable else "nvcc", "ninja")
    os.environ |= {variable: str(tmp_path / "cuda")} if variable else {}
    set_environment()
    assert SAMPLER not in os.environ


def test_vllm_samples_with_flashinfer_if_it_is_compiled(host) -> None:
    host(("flashinfer", "flashinfer_jit_cache"))
    set_environment()
    assert SAMPLER not in os.environ


def test_a_value_of_the_user_stays(host) -> None:
    host(())
    os.environ[SAMPLER] = "1"
    set_environment()
    assert os.environ[SAMPLER] == "1"
