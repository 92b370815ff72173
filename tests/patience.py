"""One factor for all deadlines of tests, which pass on busy machines, too.

A deadline that only ends a hang is written as ``patient(30)``: 30 s on a quiet machine, times
WEIGHTSYNC_TEST_PATIENCE, 4 by default. tests/conftest.py also multiplies pytest's own limit (``timeout`` in
pyproject.toml, ``pytest.mark.timeout``). An injected fault must be noticed within ``timeout_s``, which is
also written as ``patient(0.5)``, so that healthy processes meet it.
"""

from __future__ import annotations

import math
import os

VARIABLE = "WEIGHTSYNC_TEST_PATIENCE"


def _factor() -> float:
    given = os.environ.get(VARIABLE, "4")
    try:
        factor = float(given)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ValueError(f"{VARIABLE} is {given!r}, give a number above 0, such as 1 on a quiet machine")
    return factor


FACTOR = _factor()


def patient(seconds: float) -> float:
    """Return a deadline of `seconds` on a quiet machine, scaled for this one."""
    return seconds * FACTOR
