"""The level from which weightsync logs, in the driver and in all processes that it reaches."""

from __future__ import annotations

import logging
import os

from weightsync.errors import ConfigError, nearest

VARIABLE = "WEIGHTSYNC_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_logger = logging.getLogger("weightsync")


def log_level() -> str:
    """Return the level that the environment asks for, "" for none. Raises ConfigError for an unknown one."""
    given = os.environ.get(VARIABLE, "")
    if given and given.upper() not in _LEVELS:
        raise ConfigError(VARIABLE, given, nearest(given.upper(), _LEVELS))
    return given.upper()


def used_log_level() -> str:
    """Return the level that this process was given, "" for none."""
    name = logging.getLevelName(_logger.level)
    return name if name in _LEVELS else ""


def use_log_level(level: str) -> None:
    """Log from `level` on in this process, to stderr unless the root logger has handlers. "" changes nothing.

    Without a handler, Python would only show warnings and errors.
    """
    if not level:
        return
    _logger.setLevel(level)
    if not _logger.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda _: not logging.root.handlers)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
        _logger.addHandler(handler)
