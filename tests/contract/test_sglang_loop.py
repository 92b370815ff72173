"""The thread that owns SGLang's event loop, with a fake of SGLang that makes a token per request and permit.

`test_engines.py` runs it with SGLang itself, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.contract.request_loops import TIMEOUT_S, FakeServer, made, make, of, until
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.engines.serving.server_thread import Made
from weightsync.errors import DeadlineError, EngineError, StateError


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


def test_it_starts_paused_and_without_a_version(fake: FakeServer, loop: RequestLoop) -> None:
    assert (fake.calls, loop.frozen, loop.serving) == (["pause retract"], True, 0)
    with pytest.raises(StateError, match="no committed version"):
        loop.complete([[1]], of(1))


def test_keep_says_how_many_tokens_each_version_made(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    make(fake, 2)
    loop.freeze("keep", TIMEOUT_S)
    assert (loop.frozen, loop.serving) == (True, 0)
    loop.freeze("keep", TIMEOUT_S)  # is nothing new
    held = threads.submit(loop.complete, [[1]], of(1))
    loop.resume(2)
    make(fake, 2)
    assert running.result(TIMEOUT_S) == [made((1, 2), (2, 1))]
    assert held.result(TIMEOUT_S) == [made((2, 1))]
    assert fake.calls == ["pause retract", "go on", "pause retract", "go on"]


class SaysVersions(FakeServer):
    """Says at the end that the first two tokens are of version 1."""

    async def run(
        self, name: str, prompt: Sequence[int], params: int, on_made: Callable[[Made], object], salt: str
    ) -> None:
        def say(made: Made) -> object:
            return on_made(replace(made, versions=(1, 1, 5, 5)) if made.finish_reason else made)

        await super().run(name, prompt, params, say, salt)


def test_tokens_that_come_late_have_the_version_that_made_them(threads) -> None:
    fake = SaysVersions()
    loop = RequestLoop("e0", lambda: fake, FakeServer.stop)
    loop.resume(1)
    running = threads.submit(loop.complete, [[1], [1]], [*of(4), *of(9, stops=(2,))])
    until(lambda: loop.num_running == 2)
    loop.freeze("keep", TIMEOUT_S)
    loop.resume(2)
    fake.permits.release(7)
    segments = ((1, 2), (2, 2)), ((1, 2), (2, 1))
    assert running.result(TIMEOUT_S) == [made(*segments[0]), made(*segments[1], reason="stop")]
    assert loop.thread.close(TIMEOUT_S)


def test_a_wait_that_is_too_long_lets_all_go_on(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(fake, 1)
    with pytest.raises(DeadlineError, match="e0"):
        loop.freeze("wait", 0.01)
    assert loop.serving == 1
    late = threads.submit(loop.complete, [[1]], of(1))
    make(fake, 2)
    assert running.result(TIMEOUT_S) == [made((1, 2))]
    assert late.result(TIMEOUT_S) == [made((1, 1))]


def test_a_stop_token_ends_a_request_and_is_its_last(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(9, stops=(2, 7)))
    make(fake, 3)
    assert running.result(TIMEOUT_S) == [made((1, 3), reason="stop")]
    until(lambda: fake.aborted == ["e0-0-"])


def test_melt_goes_on_with_the_version_that_there_was(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(fake, 1)
    loop.freeze("keep", TIMEOUT_S)
    loop.undo_freeze()
    make(fake, 1)
    assert running.result(TIMEOUT_S) == [made((1, 2))]
    assert loop.serving == 1


def test_a_call_while_serving_holds_the_steps_only(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(fake, 1)

    async def paused(fake: FakeServer) -> str | None:
        return fake.paused

    assert loop.call(paused) == "in_place"
    assert fake.calls[-2:] == ["pause in_place", "go on"]
    make(fake, 1)
    assert running.result(TIMEOUT_S) == [made((1, 2))]


@pytest.mark.parametrize("forgot", [True, False])
def test_it_serves_only_once_caches_are_forgotten(forgot: bool) -> None:
    fake = FakeServer(forgets=True)
    fake.forgot = forgot
    loop = RequestLoop("e0", lambda: fake, FakeServer.stop)
    loop.has_cached = True
    if forgot:
        loop.resume(1)
    else:
        with pytest.raises(EngineError, match="cached"):
            loop.resume(1)
    assert fake.calls == ["pause retract", "forget", *(["go on"] if forgot else [])]
    assert loop.serving == (1 if forgot else 0)
    assert loop.thread.close(TIMEOUT_S)
