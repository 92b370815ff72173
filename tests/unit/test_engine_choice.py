"""Which engine `kind` means here."""

from __future__ import annotations

import importlib.util

import pytest

from weightsync.engines import choose_engine
from weightsync.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def only(*packages: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)

    return only


def test_auto_takes_vllm_where_it_is_installed_and_says_so(installed) -> None:
    installed("vllm", "transformers")
    assert choose_engine("auto") == ("vllm", "auto: vllm is installed")


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


def test_auto_without_any_engine_says_what_to_install(installed) -> None:
    installed()
    with pytest.raises(ConfigError, match="install one of vllm, transformers"):
        choose_engine("auto")
