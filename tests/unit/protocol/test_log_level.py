"""The level of log lines, in one process."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from weightsync.errors import ConfigError
from weightsync.protocol.log_level import VARIABLE, log_level

LOGS = """
import logging
from weightsync.protocol.log_level import use_log_level, used_log_level

def log(text):
    logging.getLogger("weightsync.part").info(text)

use_log_level("")
assert used_log_level() == ""
log("before")
for _ in range(2):
    use_log_level("INFO")
assert used_log_level() == "INFO"
log("own")
logging.basicConfig(format="ROOT %(message)s")
log("given")
"""


def test_lines_appear_once_also_where_nobody_set_up_logging() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    own, given = done.stderr.splitlines()
    assert own.startswith("INFO ")
    assert own.endswith(" weightsync.part: own")
    assert given == "ROOT given"


@pytest.mark.parametrize(("given", "level"), [("debug", "DEBUG"), ("WARNING", "WARNING"), ("", "")])
def test_a_level_is_a_name_in_any_case(given: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    assert log_level() == level
    assert not level or isinstance(getattr(logging, level), int)


def test_another_word_is_refused_with_the_nearest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "warn")
    with pytest.raises(ConfigError, match=r"WEIGHTSYNC_LOG_LEVEL: 'warn' .* did you mean 'WARNING'\?"):
        log_level()
