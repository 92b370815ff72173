"""Settings that are passed on to an engine, and texts for an engine without a tokenizer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightsync.engines.base import Completion, Rollout
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.server_thread import Made
from weightsync.engines.serving.texts import token_ids
from weightsync.engines.sglang.api import SglangServer, sampling_params, server_args
from weightsync.engines.vllm.api import engine_args
from weightsync.errors import ConfigError


class SglangParams:
    """Stands for SGLang's class of 0.5.17: some fields that a user gives, one that it sets itself."""

    def __init__(
        self,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        regex: str | None = None,
        stop: list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        sampling_seed: int | None = None,
        is_normalized: bool = False,
    ) -> None:
        self.top_p = top_p

    def verify(self, vocab_size: int) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")


class Request(SimpleNamespace):
    """Stands for SGLang's ``GenerateReqInput``."""


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {
        "sglang.srt.sampling.sampling_params": {"SamplingParams": SglangParams},
        "sglang.srt.managers.io_struct": {"GenerateReqInput": Request},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.sampling", "sglang.srt.managers", *found):
        module = ModuleType(name)
        vars(module).update(found.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def sglang_params(index: int = 0, **settings: object) -> dict[str, Any]:
    return sampling_params(Sampling.of(settings), index, draws_by_seeds=False)


def test_sglang_gets_our_settings_under_its_names_and_its_own_as_they_are(sglang: None) -> None:
    ours = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True, "return_logprob": True}
    assert sglang_params() == ours
    assert sglang_params(2, seed=5, top_p=0.5) == ours | {"sampling_seed": 7, "top_p": 0.5}
    assert sglang_params(stop="x", stop_token_ids=[3]) == ours | {"stop": ["x"]}
    ends = {"ignore_eos": False, "stop_token_ids": [3]}
    assert sglang_params(ignore_eos=False, stop_token_ids=[3]) == ours | ends
    assert sglang_params(logprobs=False) == ours | {"return_logprob": False}


def test_sglang_that_draws_by_seeds_gets_another_one_for_each_completion(sglang: None) -> None:
    drawn = [sampling_params(Sampling(), index, True)["sampling_seed"] for index in range(8)]
    assert len(set(drawn)) == 8
    given = [sampling_params(Sampling(seed=5), index, True)["sampling_seed"] for index in range(3)]
    assert given == [5, 6, 7]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"top_pp": 0.5}, "sampling.top_pp: 0.5 is not valid; the key is unknown; did you mean 'top_p'?"),
        ({"passed": {}}, "sampling.passed: {} is not valid; the key is unknown"),
        ({"max_new_tokens": 3}, "sampling.max_new_tokens: 3 is not valid; give max_tokens"),
        ({"is_normalized": True}, "sampling.is_normalized: True is not valid; leave it out: SGLang sets it"),
        ({"top_p": 2.0}, "sampling.top_p: 2.0 is not valid; SGLang says: top_p must be in (0, 1], got 2.0."),
    ],
)
def test_what_sglang_does_not_know_is_named(sglang: None, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sglang_params(**settings)
    assert str(caught.value).startswith(says)


def test_sglang_says_log_probabilities_and_reasons(sglang: None) -> None:
    asked: list[Request] = []

    async def generate(request: Request, _: None) -> AsyncIterator[dict[str, Any]]:
        asked.append(request)
        for number in (1, 2):
            told = {"output_token_logprobs": [(-0.5, 4, None), (-0.25, 5, None)][:number]}
            told["finish_reason"] = {"type": "length", "length": 2} if number == 2 else None
            yield {"output_ids": [4, 5][:number], "meta_info": told}

    server = object.__new__(SglangServer)
    server.manager = SimpleNamespace(generate_request=generate)
    made: list[Made] = []
    asyncio.run(server.run("e0-0-", [1], sglang_params(), made.append, ""))
    assert [(each.tokens, each.logprobs(), each.finish_reason) for each in made] == [
        ([4], [-0.5], ""),
        ([4, 5], [-0.5, -0.25], "length"),
    ]
    (request,) = asked
    assert request.return_logprob is True
    assert "return_logprob" not in request.sampling_params


def test_texts_want_a_tokenizer() -> None:
    for settings, prompts, field in (
        ({}, [[1], "How are you?"], "prompts[1]"),
        ({"stop": ["\n"]}, [[1]], "sampling.stop"),
    ):
        with pytest.raises(ConfigError, match="this engine has no tokenizer: give token ids") as caught:
            token_ids(prompts, Sampling.of(settings), None)
        assert caught.value.field == field
    words = SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    assert token_ids(["a bc", [7]], Sampling(n=2), words) == [[1, 2], [1, 2], [7], [7]]


@pytest.mark.parametrize(("start", "kind"), [(server_args, "sglang"), (engine_args, "vllm")])
def test_an_engine_is_not_started_to_say_tokens_late(start: Any, kind: str, tmp_path: Any) -> None:
    """A token has the version that serves as it comes."""
    pytest.importorskip(kind)
    with pytest.raises(ConfigError, match=r"options\.stream_interval: 4 .* leave it out: a token has"):
        start(str(tmp_path), {"stream_interval": 4}, False if kind == "sglang" else "")


def test_a_rollout_says_the_oldest_version_and_what_was_cut() -> None:
    rollout = Rollout.of(
        [
            Completion([1, 2, 3], [(4, 1), (5, 2)], [-1.0, -2.0, -3.0], "length"),
            Completion([], [(5, 0)], [], "abort"),
        ]
    )
    assert rollout.versions == [(4, 5), (5, 5)]
    assert (rollout.version, rollout.aborted) == (4, [False, True])
    assert Rollout.of([]).version == 0
