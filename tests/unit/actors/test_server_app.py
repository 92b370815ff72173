"""A server that cannot join a driver says so when it starts, and does not start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.actors.servers.vllm import JoinDriver
from weightsync.errors import ConfigError

APP = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_server_count=2)))
"""The application of a server with an option with which no update works."""


def start() -> tuple[list[Any], BaseException]:
    """Start an application as an ASGI server does. Returns what it says of its start, and the error."""
    said = list[Any]()

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        said.append(message)

    with pytest.raises(ConfigError) as raised:
        asyncio.run(JoinDriver(None)({"type": "lifespan", "app": APP}, receive, send))
    return said, raised.value


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """Yield weightsync's logger, and restore it."""
    logger = logging.getLogger("weightsync")
    level, handlers = logger.level, [*logger.handlers]
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_JOIN": "10.0.0.1:29500", "WEIGHTSYNC_TOKEN": "short"}, "WEIGHTSYNC_TOKEN"),
        (
            {"WEIGHTSYNC_JOIN": "10.0.0.1:29500", "WEIGHTSYNC_TOKEN": "a secret of the fleet"},
            "--api-server-count",
        ),
    ],
)
def test_a_server_that_cannot_join_does_not_start(
    env: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception alone, uvicorn serves requests, with weights that no driver has sent."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    said, error = start()
    assert named in str(error)
    assert said == [{"type": "lifespan.startup.failed", "message": str(error)}]


def test_warnings_are_logged_where_the_root_logger_only_logs_errors(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    """vLLM's server raises the root logger's level."""
    monkeypatch.setenv("WEIGHTSYNC_JOIN", "10.0.0.1:29500")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a secret of the fleet")
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    logger.setLevel(logging.NOTSET)
    assert not logger.isEnabledFor(logging.WARNING)
    start()
    assert logger.isEnabledFor(logging.WARNING)
    assert not logger.isEnabledFor(logging.INFO)
    monkeypatch.setenv("WEIGHTSYNC_LOG_LEVEL", "INFO")
    start()
    assert logger.isEnabledFor(logging.INFO)
