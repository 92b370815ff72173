"""Engines with more ranks than an update reaches are refused before they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import build_tiny_qwen3, save_tokenizer
from tests.vllm_imports import import_vllm
from weightsync.engines import make_engine
from weightsync.errors import ConfigError

REPLICAS = "register an engine for each replica"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("data_parallel_size", REPLICAS),
        ("pipeline_parallel_size", "cut the model by tensor_parallel_size"),
        ("prefill_context_parallel_size", "are not tested"),
        ("nnodes", "on one host"),
        ("enable_expert_parallel", "on CPUs"),
    ],
)
def test_vllms_are_refused_by_name(tmp_path: Path, option: str, says: str) -> None:
    import_vllm()
    value = True if option == "enable_expert_parallel" else 2
    with pytest.raises(ConfigError, match=f"options.{option}: {value} is not valid; leave it out.* {says}"):
        make_engine("vllm", str(tmp_path), "e0", {option: value})


def test_options_that_do_not_fit_the_model_are_refused_in_vllms_own_words(tmp_path: Path) -> None:
    import_vllm()
    build_tiny_qwen3(tmp_path)
    options = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "max_model_len": 128}
    with pytest.raises(ConfigError, match="vLLM says of it: Decode context parallelism") as told:
        make_engine("vllm", str(tmp_path), "e0", options)
    assert "\n" not in str(told.value)


def test_sglang_that_does_not_tell_versions_takes_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    from weightsync.engines.sglang.api import server_args

    build_tiny_qwen3(tmp_path)
    save_tokenizer(tmp_path, [5])
    given = {"device": "cpu"}
    assert server_args(str(tmp_path), given, sessions=False)["skip_tokenizer_init"]
    assert not server_args(str(tmp_path), given, sessions=True)["skip_tokenizer_init"]
    with pytest.raises(ConfigError, match=r"options\.skip_tokenizer_init: False is not valid; give true"):
        server_args(str(tmp_path), {**given, "skip_tokenizer_init": False}, sessions=False)


@pytest.mark.parametrize("option", ["dp_size", "pp_size", "nnodes"])
def test_sglangs_are_refused_by_name(option: str) -> None:
    from weightsync.engines.sglang.api import server_args

    with pytest.raises(ConfigError, match=f"options.{option}: 2 is not valid; leave it out"):
        server_args("", {option: 2}, sessions=True)
