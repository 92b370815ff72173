"""A server that cannot join a driver says so when it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from weightsync.actors.servers.app import JoinsDriver
from weightsync.errors import ConfigError


class App(JoinsDriver):
    async def _served(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """Yield weightsync's logger, and restore it."""
    logger = logging.getLogger("weightsync")
    level, handlers = logger.level, [*logger.handlers]
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_a_server_without_the_drivers_address_or_a_token_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="WEIGHTSYNC_JOIN"):
        App(None)
    monkeypatch.setenv("WEIGHTSYNC_JOIN", "10.0.0.1:29500")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "too short")
    with pytest.raises(ConfigError, match=r"WEIGHTSYNC_TOKEN.*at least 16 characters"):
        App(None)
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a secret of the fleet")
    App(None)


def test_warnings_are_logged_where_the_root_logger_only_logs_errors(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    """vLLM's server raises the root logger's level."""
    monkeypatch.setenv("WEIGHTSYNC_JOIN", "10.0.0.1:29500")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a secret of the fleet")
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    logger.setLevel(logging.NOTSET)
    assert not logger.isEnabledFor(logging.WARNING)
    App(None)
    assert logger.isEnabledFor(logging.WARNING)
    assert not logger.isEnabledFor(logging.INFO)
    monkeypatch.setenv("WEIGHTSYNC_LOG_LEVEL", "INFO")
    App(None)
    assert logger.isEnabledFor(logging.INFO)
