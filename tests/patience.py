"""One factor for every deadline of the tests: a busy machine makes them slower, not red.

A deadline that only ends a hang is written as ``patient(30)``: 30 s on a quiet machine, times the factor,
which WEIGHTSYNC_TEST_PATIENCE sets and which is 4 by default. tests/conftest.py multiplies pytest's own limit
(``timeout`` in pyproject.toml, ``pytest.mark.timeout``) by it, too. A fault that a test injects has to be
noticed within ``timeout_s``: that is ``patient(0.5)``, too, so that those who are sound come within it.
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
    """`seconds` of a quiet machine, as long as a hang may last here."""
    return seconds * FACTOR
