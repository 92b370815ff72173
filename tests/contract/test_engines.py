"""What every engine adapter must do, on a dense and on a mixture-of-experts model."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from tests.contract.conftest import ENDED, LOGPROB_SLACK, TIMEOUT_S, Rig
from tests.models import greedy, logprobs
from weightsync.engines import ExportsAhead, ExportsMemory, Rollout, make_engine
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import named_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.slow,
]

PROMPTS = [
    torch.randint(3, 250, (4 + i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)
]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline


def test_layout_is_the_checkpoint(rig: Rig) -> None:
    (rank,) = rig.layout
    tensors, tied = named_tensors(rig.models[0])
    assert {meta.name: meta.shape for meta in rank.tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {meta.dtype for meta in rank.tensors} == {rig.dtype}
    assert rank.tied == tied
    assert bool(rank.device) == rig.on_gpu
    assert bool(rank.buffers) == (rig.kind != "vllm" or rig.on_gpu)


def test_it_says_before_it_is_attached_whether_it_exports_its_memory(rig: Rig) -> None:
    assert isinstance(rig.engine, ExportsMemory)
    could = list(rig.engine.can_export())
    ahead = rig.engine.export() if isinstance(rig.engine, ExportsAhead) else None
    rig.connect(rig.plan)
    assert could == rig.exported
    assert ahead is None or [each is not None for each in ahead] == could


def test_serves_what_was_sent_and_then_what_was_sent_next(rig: Rig) -> None:
    served = []
    for version, model in enumerate(rig.models, start=1):
        digests = rig.update(model, version)
        tensors = named_tensors(model)[0]
        sent = [tensor_digest(tensors[meta.name], meta.shape) for meta in rig.plan.tensors]
        np.testing.assert_array_equal(digests, np.array(sent, dtype=np.uint64))
        rollout = rig.generate(PROMPTS).result(TIMEOUT_S)
        assert rig.serves(model, PROMPTS, rollout.tokens)
        assert rollout.versions == [(version, version)] * len(PROMPTS)
        served.append(rollout.tokens)
    assert all(first != second for first, second in zip(*served, strict=True))


def test_greedy_tokens_are_diverse(rig: Rig) -> None:
    """Else equal tokens would say little about equal weights."""
    assert min(len(set(tokens)) for tokens in greedy(rig.models[0], PROMPTS)) >= 6


def test_each_rank_says_what_its_load_took(rig: Rig) -> None:
    before = time.time()
    rig.update(rig.models[0], 1)
    load, verify = rig.loaded.spans
    assert (load.name, verify.name) == ("load", "verify")
    assert before <= load.began < load.began + load.seconds <= verify.began + 1e-3
    assert verify.began + verify.seconds <= time.time() + 1e-3


def paused_midway(rig: Rig, mode: str) -> Future[Rollout]:
    """Two requests of 40 tokens, paused at their sixth forward pass."""
    with rig.stopped_at(forward=6) as (arrived, go_on):
        running = rig.generate(PROMPTS[:2], max_tokens=40)
        assert arrived.wait(TIMEOUT_S)
        paused = rig.threads.submit(rig.engine.pause, mode, TIMEOUT_S)
        wait_until(rig.is_asked_to_pause)
        go_on.set()
        paused.result(TIMEOUT_S)
    return running


def test_a_request_lives_through_an_update(rig: Rig) -> None:
    old, new = rig.models
    rig.update(old, 1)
    running = paused_midway(rig, "keep")
    rig.load(new)
    rig.engine.resume(2)
    rollout = running.result(TIMEOUT_S)
    if rig.kind == "torch":
        assert rollout.versions == [(1, 1)] * 2
        assert rig.serves(old, PROMPTS[:2], rollout.tokens, 40)
        return
    assert rollout.versions == [(1, 2)] * 2
    assert rollout.version == 1
    for prompt, tokens, segments, values in zip(
        PROMPTS, rollout.tokens, rollout.segments, rollout.logprobs, strict=False
    ):
        (_, kept), _ = segments
        assert kept in rig.kept()
        assert segments == [(1, kept), (2, 40 - kept)]
        assert rig.serves(old, [prompt], [tokens[:kept]], kept)
        assert rig.serves(new, [prompt + tokens[:kept]], [tokens[kept:]], 40 - kept)
        wanted = logprobs(old, prompt, tokens[:kept]) + logprobs(new, prompt + tokens[:kept], tokens[kept:])
        assert values == pytest.approx(wanted, abs=LOGPROB_SLACK[rig.kind])


def test_a_pause_can_end_requests_with_the_tokens_that_they_have(rig: Rig) -> None:
    old, new = rig.models
    rig.update(old, 1)
    rollout = paused_midway(rig, "abort").result(TIMEOUT_S)
    assert rollout.aborted == [True] * 2
    assert rollout.finish_reasons == ["abort"] * 2
    assert rollout.segments == [[(1, len(tokens))] for tokens in rollout.tokens]
    assert [len(each) for each in rollout.logprobs] == [len(tokens) for tokens in rollout.tokens]
    for prompt, tokens in zip(PROMPTS, rollout.tokens, strict=False):
        assert 3 <= len(tokens) < 40
        assert rig.serves(old, [prompt], [tokens], len(tokens))
    rig.load(new)
    rig.engine.resume(2)
    whole = rig.generate(PROMPTS).result(TIMEOUT_S)
    assert not any(whole.aborted)
    assert rig.serves(new, PROMPTS, whole.tokens)


def test_new_requests_wait_for_resume(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    rig.engine.pause("wait", TIMEOUT_S)
    waiting = rig.generate(PROMPTS[:1])
    rig.load(rig.models[1])
    assert not waiting.done()
    rig.engine.resume(2)
    assert rig.serves(rig.models[1], PROMPTS[:1], waiting.result(TIMEOUT_S).tokens)


def test_a_pause_that_comes_too_late_changes_nothing(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    with rig.stopped_at(forward=3) as (arrived, go_on):
        running = rig.generate(PROMPTS[:1])
        assert arrived.wait(TIMEOUT_S)
        with pytest.raises(DeadlineError, match="e0"):
            rig.engine.pause("wait", 0.01)
        go_on.set()
    assert rig.serves(rig.models[0], PROMPTS[:1], running.result(TIMEOUT_S).tokens)
    assert rig.serves(rig.models[0], PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)


def test_a_load_needs_a_pause(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    with pytest.raises(StateError, match="pause it first"):
        rig.engine.load(99, TIMEOUT_S)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_a_load_that_ends_early_heals_with_the_next(rig: Rig, share: float) -> None:
    rig.update(rig.models[0], 1)
    rig.engine.pause("keep", TIMEOUT_S)
    waiting = rig.generate(PROMPTS)
    with pytest.raises(EngineError, match="the test gave up"):
        rig.load(rig.models[1], num_buckets=int(share * rig.plan.num_buckets))
    with pytest.raises(StateError, match="e0"):  # turned away at once, now and later
        waiting.result(TIMEOUT_S)
    with pytest.raises(StateError, match="e0"):
        rig.generate(PROMPTS).result(TIMEOUT_S)
    with pytest.raises(StateError, match="no whole weights"):
        rig.engine.resume(2)
    rig.load(rig.models[1])
    rig.engine.resume(2)
    assert rig.serves(rig.models[1], PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_has_no_memory_and_the_next_load_wakes_it(rig: Rig, level: int) -> None:
    if not rig.sleeps:
        with pytest.raises(ConfigError, match=rf"enable_\w+: False.*engine e0.*level {level}.*true"):
            rig.engine.sleep(level, "wait", TIMEOUT_S)
        return
    rig.update(rig.models[0], 1)
    awake = rig.live_nbytes()
    for version, model in ((2, rig.models[1]), (3, rig.models[0])):
        rig.engine.sleep(level, "wait", TIMEOUT_S)
        rig.engine.sleep(level, "wait", TIMEOUT_S)  # is nothing new
        assert (awake > 0, rig.live_nbytes(), rig.engine.serving()) == (True, 0, 0)
        with pytest.raises(StateError, match="e0 is asleep"):
            rig.generate(PROMPTS).result(TIMEOUT_S)
        with pytest.raises(StateError, match="e0 is asleep: pause it first"):
            rig.engine.load(99, TIMEOUT_S)
        if version == 2:
            rig.connect(rig.plan)  # a new epoch finds it asleep
        rig.update(model, version)
        assert rig.live_nbytes() == awake
        assert rig.serves(model, PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)


def test_only_with_its_weights_on_the_host_it_wakes_without_a_load(rig: Rig) -> None:
    if not rig.sleeps:
        pytest.skip("it cannot sleep here")
    rig.update(rig.models[0], 1)
    rig.engine.sleep(1, "wait", TIMEOUT_S)
    rig.engine.pause("wait", TIMEOUT_S)
    rig.engine.resume(1)
    assert rig.serves(rig.models[0], PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)
    rig.engine.sleep(2, "wait", TIMEOUT_S)
    rig.engine.pause("wait", TIMEOUT_S)
    with pytest.raises(StateError, match="no whole weights"):
        rig.engine.resume(1)
    with pytest.raises(EngineError, match="the test gave up"):
        rig.load(rig.models[1], num_buckets=1)
    rig.engine.sleep(2, "wait", TIMEOUT_S)  # half loaded, or not at all
    rig.update(rig.models[1], 2)
    assert rig.serves(rig.models[1], PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)


def test_missing_bytes_are_named(rig: Rig) -> None:
    whole = rig.plan
    rig.engine.pause("keep", TIMEOUT_S)
    last = {whole.tensors[piece.tensor].name for piece in whole.bucket(whole.num_buckets - 1).pieces}
    rig.connect(rig.without_last_bucket())
    with pytest.raises(EngineError, match="did not come") as caught:
        rig.load(rig.models[0])
    assert any(name in str(caught.value) for name in last)
    rig.connect(whole)
    rig.update(rig.models[0], 1)
    assert rig.serves(rig.models[0], PROMPTS, rig.generate(PROMPTS).result(TIMEOUT_S).tokens)


def test_sampling(rig: Rig) -> None:
    rig.update(rig.models[0], 1)

    def draw(**sampling: object) -> list[list[int]]:
        return rig.engine.generate([PROMPTS[0]] * 4, {"max_tokens": 8, **sampling}).tokens

    if rig.kind == "sglang" and not rig.on_gpu:
        with pytest.raises(ConfigError, match=r"sampling\.seed.*enable_deterministic_inference"):
            draw(seed=5)
        seeded = draw()
    else:
        seeded = draw(seed=5)
        assert seeded == draw(seed=5)
        assert seeded != draw(seed=50)
    assert len({tuple(tokens) for tokens in seeded}) == 4
    plain = draw(temperature=0.0)
    stop = plain[0][3]
    until = plain[0].index(stop) + 1
    assert draw(temperature=0.0, stop_token_ids=[stop]) == [plain[0][:until]] * 4
    with pytest.raises(ConfigError, match=r"sampling\.temprature"):
        draw(temprature=1.0)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens"):
        draw(max_tokens=0)


def test_log_probabilities_are_the_models_own_whatever_was_asked(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    settings = {"max_tokens": 8, "n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    if rig.kind == "sglang" and rig.on_gpu:  # it draws by seeds there
        with pytest.raises(ConfigError, match=r"sampling\.min_p: 0\.01 .*process would end"):
            rig.engine.generate(PROMPTS, settings)
        del settings["min_p"]
    rollout = rig.engine.generate(PROMPTS, settings)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    for prompt, tokens, values in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
        wanted = logprobs(rig.models[0], prompt, tokens)
        assert values == pytest.approx(wanted, abs=LOGPROB_SLACK[rig.kind])
    assert len({tuple(tokens) for tokens in rollout.tokens[:3]}) > 1
    assert rollout.segments == [[(1, 8)]] * len(prompts)
    assert rollout.finish_reasons == ["length"] * len(prompts)
    assert rollout.texts == []
    without = rig.engine.generate(PROMPTS[:1], {"max_tokens": 2, "logprobs": False})
    assert without.logprobs == [[]]
    with pytest.raises(ConfigError, match=r"sampling\.logprobs: 5 is not valid; give true or false"):
        rig.engine.generate(PROMPTS[:1], {"logprobs": 5})


def test_the_engine_gets_settings_that_it_knows_itself(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    likeliest = rig.engine.generate(PROMPTS, {"top_k": 1, "max_tokens": 16}).tokens
    assert rig.serves(rig.models[0], PROMPTS, likeliest)
    penalised = {"temperature": 0.0, "repetition_penalty": 1.9, "max_tokens": 16}
    assert rig.engine.generate(PROMPTS, penalised).tokens != likeliest
    refused = {"vllm": "output_kind", "sglang": "sampling_seed", "torch": "num_beams"}[rig.kind]
    for settings, says in (
        ({"top_kk": 1}, r"sampling\.top_kk: 1 is not valid; the key is unknown; did you mean 'top_k'\?"),
        ({"max_token": 1}, r"sampling\.max_token: .* did you mean 'max_tokens'"),
        ({"top_p": -0.5}, r"sampling\.top_p: -0\.5 is not valid; \w+ says: "),
        ({refused: 1}, rf"sampling\.{refused}: 1 is not valid"),
        ({"n": 0}, r"sampling\.n: 0 is not valid; give 1 or more"),
        ({"stop": [""]}, r"sampling\.stop.*not empty"),
    ):
        with pytest.raises(ConfigError, match=says):
            rig.engine.generate(PROMPTS[:1], settings)


def test_a_completion_says_why_it_ended(rig: Rig) -> None:
    rig.update(rig.models[0], 1)

    def ended(**settings: object) -> tuple[int, str]:
        rollout = rig.engine.generate([ENDED], {"temperature": 0.0, "max_tokens": 16, **settings})
        return len(rollout.tokens[0]), rollout.finish_reasons[0]

    (said,) = rig.engine.generate([ENDED], {"temperature": 0.0, "max_tokens": 16}).tokens
    until = said.index(rig.end) + 1
    assert ended() == (16, "length")
    assert ended(stop_token_ids=[rig.end]) == (until, "stop")
    assert ended(ignore_eos=False) == (until, "stop")
    assert ended(ignore_eos=False, stop_token_ids=[said[0]]) == (1, "stop")
    if rig.has_tokenizer:
        assert ended(stop=f"w{rig.end}") == (until, "stop")
        assert ended(stop=["w999", f"w{said[0]}"]) == (1, "stop")


def test_texts_are_answered_by_texts(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    if not rig.has_tokenizer:
        with pytest.raises(ConfigError, match="this engine has no tokenizer"):
            rig.engine.generate(["w5"], {})
        return
    settings = {"temperature": 0.0, "max_tokens": 16}
    by_ids = rig.engine.generate([ENDED], settings)
    by_text = rig.engine.generate([" ".join(f"w{token}" for token in ENDED)], settings)
    assert by_text.tokens == by_ids.tokens
    assert by_text.texts == [" ".join(f"w{token}" for token in by_ids.tokens[0])]
    stopped = rig.engine.generate(["w5 w6 w7 w8", [1, 2]], {**settings, "n": 2, "stop": [f"w{rig.end}"]})
    until = by_ids.tokens[0].index(rig.end)
    assert [text.split() for text in stopped.texts[:2]] == [by_text.texts[0].split()[:until]] * 2
    assert len(stopped.texts) == 4


def test_concurrent_calls_get_their_own_answers(rig: Rig) -> None:
    rig.update(rig.models[0], 1)
    calls = [rig.generate([prompt]) for prompt in PROMPTS]
    assert rig.serves(rig.models[0], PROMPTS, [call.result(TIMEOUT_S).tokens[0] for call in calls])


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("torch", {"tensor_parallel_size": 2}, "options.tensor_parallel_size"),
        ("torch", {"dtype": "float8_e4m3fn"}, "options.dtype"),
        ("vllm", {"dtype": "float64"}, "options.dtype"),
        ("vllm", {"max_model_length": 128}, "options.max_model_length"),
        ("vllm", {"load_format": "auto"}, "options.load_format"),
        ("vllm", {"speculative_config": "eagle"}, "options.speculative_config"),
        ("vllm", {"spec_tokens": 3}, "options.spec_tokens"),
        (
            "vllm",
            {"speculative_config": {"draft_load_config": {"load_format": "dummy"}}},
            "options.speculative_config.draft_load_config",
        ),
        ("vllm", {"num_speculative_tokens": 3}, "options.num_speculative_tokens"),
        (
            "vllm",
            {"enable_eplb": True, "eplb_config": {"use_async": True}},
            "options.eplb_config.use_async",
        ),
        ("sglang", {"dtype": "float64"}, "options.dtype"),
        ("sglang", {"memory_fraction_static": 0.5}, "options.memory_fraction_static"),
        ("sglang", {"load_format": "auto"}, "options.load_format"),
        ("sglang", {"enable_eplb": True}, "options.enable_eplb"),
        ("sglang", {"ep_num_redundant_experts": 2}, "options.ep_num_redundant_experts"),
        ("sglang", {"dtype": "bfloat16", "tensor_parallel_size": 64}, "options.tensor_parallel_size"),
    ],
)
def test_wrong_options_are_named(kind: str, options: dict[str, object], field: str, tmp_path_factory) -> None:
    pytest.importorskip("transformers" if kind == "torch" else kind)
    with pytest.raises(ConfigError) as caught:
        make_engine(kind, str(tmp_path_factory.getbasetemp()), "e0", options)
    assert caught.value.field == field
    assert ("in options.speculative_config" in caught.value.remedy) == (field == "options.spec_tokens")
