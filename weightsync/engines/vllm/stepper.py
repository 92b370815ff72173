"""Runs requests through vLLM's LLMEngine, stepped on the event loop of a thread."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weightsync.engines.base import DraftCounts
from weightsync.engines.serving.server_thread import Made
from weightsync.engines.serving.texts import Tokenizer
from weightsync.engines.vllm.lora import Adapted

_NUM_DRAFTED, _NUM_ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


class Steppable(Protocol):
    """The methods of vLLM's ``LLMEngine`` that are used here."""

    tokenizer: Tokenizer | None
    log_stats: bool

    def get_metrics(self) -> Iterable[Any]: ...
    def add_request(
        self, request_id: str, prompt: object, params: object, *, lora_request: object = ...
    ) -> object: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def reset_prefix_cache(self, reset_running_requests: bool = ...) -> bool: ...
    def sleep(self, level: int, mode: str) -> None: ...
    def wake_up(self, tags: list[str]) -> object: ...
    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> list[bytes]: ...


class Stepper:
    """An `AsyncServer` for a vLLM scheduler that runs in this process. Each step blocks the event loop.

    Attributes:
        engine: vLLM's engine. Use it only on the loop's thread.
        tokenizer: vLLM's own, None if it was started without one.
        broken: whether a step failed: vLLM makes no more tokens.
    """

    forgets = True

    def __init__(self, engine: Steppable) -> None:
        self.loop = asyncio.get_event_loop()
        self.engine, self.broken = engine, False
        self.tokenizer = engine.tokenizer
        self._requests: dict[str, tuple[Callable[[Made], object], asyncio.Future[None]]] = {}
        self._paused, self._scheduled = True, False

    async def run(
        self, name: str, prompt: Sequence[int], params: object, on_made: Callable[[Made], object], salt: str
    ) -> None:
        """Run a request, see `AsyncServer.run`.

        Raises ValueError, RuntimeError if vLLM gives the request up, or the error of a step that failed.
        """
        tokens: dict[str, object] = {"type": "token", "prompt_token_ids": list(prompt)}
        if salt:
            tokens["cache_salt"] = salt
        if isinstance(params, Adapted):
            self.engine.add_request(name, tokens, params.sampling, lora_request=params.lora)
        else:
            self.engine.add_request(name, tokens, params)
        ended = self.loop.create_future()
        self._requests[name] = on_made, ended
        self._step_soon()
        await ended

    def abort(self, name: str) -> None:
        """End a request early."""
        self.engine.abort_request([name])
        self._end(name)

    async def pause(self, mode: str) -> None:
        """Step no more, see `AsyncServer.pause`."""
        self._paused = True
        if mode == "retract":
            self.engine.sleep(0, "keep")
            # With asynchronous scheduling vLLM has launched one step more. Its tokens are of these weights.
            self._run()

    async def go_on(self) -> None:
        """End a pause."""
        self.engine.wake_up(["scheduling"])
        self._paused = False
        self._step_soon()

    async def forget(self) -> bool:
        """Drop cached prefixes, and the caches of frozen requests, which are then recomputed."""
        self.engine.reset_prefix_cache(reset_running_requests=True)
        return True

    def release(self) -> Steppable:
        """Step no more, and return the engine, to be ended."""
        self._paused = True
        return self.engine

    def _step_soon(self) -> None:
        if self._requests and not self._paused and not self._scheduled:
            self._scheduled = True
            # A call from another thread begins after two rounds of the loop: no step comes before it.
            self.loop.call_soon(self.loop.call_soon, self._step)

    def _step(self) -> None:
        self._scheduled = False
        if not self._paused:
            self._run()

    def _run(self) -> None:
        if not self._requests:
            return
        try:
            outputs = self.engine.step()
        except Exception as error:  # noqa: BLE001 - every waiting request raises it
            self.broken = True
            for _, ended in self._requests.values():
                ended.set_exception(error)
            self._requests.clear()
            return
        for output in outputs:
            if output.request_id in self._requests:  # else aborted since
                on_made, ended = self._requests[output.request_id]
                made = _made(output.outputs[0])
                if made.finish_reason == "error":
                    said = getattr(output, "error", None)
                    ended.set_exception(RuntimeError(f"vLLM gave the request up: {said}"))
                    del self._requests[output.request_id]
                    continue
                on_made(made)
                if output.finished:
                    self._end(output.request_id)
        self._step_soon()

    def _end(self, name: str) -> None:
        if name in self._requests:
            _, ended = self._requests.pop(name)
            ended.set_result(None)


def _made(output: Any) -> Made:  # noqa: ANN401 - vLLM's
    def logprobs() -> list[float]:
        pairs = zip(output.token_ids, output.logprobs or (), strict=False)
        return [by_token[token].logprob for token, by_token in pairs]

    return Made(output.token_ids, logprobs, output.finish_reason or "")


def draft_counts(engine: Steppable) -> DraftCounts | None:
    """Return the counts since the engine started. None if it does not speculate, or keeps no statistics."""
    if not engine.log_stats:
        return None
    counts = Counter[str]()
    for metric in engine.get_metrics():
        if metric.name in (_NUM_DRAFTED, _NUM_ACCEPTED):
            counts[metric.name] += int(metric.value)
    return DraftCounts(counts[_NUM_DRAFTED], counts[_NUM_ACCEPTED]) if counts else None
