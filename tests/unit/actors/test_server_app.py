"""A server that cannot join a driver says so when it starts."""

from __future__ import annotations

import pytest

from weightsync.actors.servers.app import JoinsDriver
from weightsync.errors import ConfigError


class App(JoinsDriver):
    async def _served(self, *_: object) -> None: ...


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
