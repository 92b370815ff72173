"""Keeps the version of an adapter in its slot while a server's request uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from weightsync.engines.lora.adapter_engine import AdapterEngine
from weightsync.errors import StateError


class _Asked(msgspec.Struct):
    """The fields of a request's body that are read here."""

    model: str | None = None
    background: Any = None


async def pass_on(
    app: Callable[..., Any],
    scope: Any,  # noqa: ANN401 - ASGI's
    receive: Callable[..., Any],
    send: Callable[..., Any],
    adapters_of: Callable[[str | None], Sequence[AdapterEngine]],
) -> None:
    """Have `app` answer a request, within `AdapterEngine.use` of the adapters that it may use.

    `adapters_of`: returns the adapters that a model's name stands for, all of them for None. A request for an
    adapter without a version, or in the background, is answered by an error: it would not be waited for.
    """
    came = [await receive()]
    while came[-1].get("more_body"):
        came.append(await receive())
    asked = _asked(b"".join(each.get("body", b"") for each in came))
    adapters = adapters_of(asked.model)

    async def receive_again() -> Any:  # noqa: ANN401
        return came.pop(0) if came else await receive()

    with ExitStack() as used:
        try:
            for each in adapters:
                used.enter_context(each.use())
        except StateError as error:
            await _refuse(send, 404, str(error))
            return
        if adapters and asked.background:
            await _refuse(
                send, 400, "background: leave it out, since the adapter may change before the answer"
            )
            return
        await app(scope, receive_again, send)


def _asked(body: bytes) -> _Asked:
    """Parse a body. A request without a model is for the served one; another body may name any model."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except msgspec.DecodeError:  # such as NaN, which servers may take
        with suppress(ValueError, AttributeError):
            return _Asked(background=json.loads(body).get("background"))
        return _Asked()
    asked.model = asked.model or ""
    return asked


async def _refuse(send: Callable[..., Any], status: int, why: str) -> None:
    body = msgspec.json.encode({"error": {"message": why, "code": status}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
