"""Which engine `kind` means here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from weightsync.engines import choose_engine, make_engine
from weightsync.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def only(*packages: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)

    return only


def test_auto_takes_vllm_where_it_is_installed_and_says_so(installed) -> None:
    installed("vllm", "transformers")
    assert choose_engine("auto") == ("vllm", "auto: vllm is installed")


@pytest.mark.parametrize(("has_gpu", "kind"), [(True, "sglang"), (False, "torch")])
def test_auto_passes_over_sglang_where_it_cannot_start(
    installed, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, kind: str
) -> None:
    installed("sglang", "transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert choose_engine("auto")[0] == kind
    assert choose_engine("sglang")[0] == "sglang"


def test_auto_falls_back_to_transformers(installed) -> None:
    installed("transformers")
    assert choose_engine("auto") == ("torch", "auto: transformers is installed")


def test_a_named_engine_that_is_not_installed_is_refused_with_a_remedy(installed) -> None:
    installed("transformers")
    with pytest.raises(ConfigError, match=r"engines\.main\.kind: 'vllm' is not valid; vllm is not installed"):
        choose_engine("vllm", field="engines.main.kind")


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        choose_engine("vlm")


@pytest.mark.parametrize("kind", ["no_such_package.engines:Engine", "json:Engine", "json:", ":Engine"])
def test_a_class_that_cannot_be_imported_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"kind: .* is not valid; give package\.module:Class"):
        choose_engine(kind)


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_path: '.*nope' is not valid; there is no such folder"):
        make_engine("torch", str(tmp_path / "nope"), "e0", {})


def test_auto_without_any_engine_says_what_to_install(installed) -> None:
    installed()
    with pytest.raises(ConfigError, match="install one of vllm, sglang, transformers"):
        choose_engine("auto")
