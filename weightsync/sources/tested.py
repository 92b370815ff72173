"""Versions of training libraries that weightsync was tested with."""

from __future__ import annotations

import logging
from importlib import metadata

TESTED = {"deepspeed": ("0.19.8",), "mbridge": ("0.15.1",), "megatron-core": ("0.16.1", "0.19.2")}
"""Distributions, and their versions that the tests have run with."""


def installed(library: str) -> str:
    """Return a library's installed version, empty if there is none."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def untested(library: str) -> str:
    """Return a warning if a library's installed version was not tested, else empty."""
    found = installed(library)
    if not found or found in TESTED[library]:
        return ""
    return f"{library} {found} is installed, and weightsync is tested with {', '.join(TESTED[library])}"


def warn_untested(library: str) -> None:
    """Log the warning of `untested`."""
    if warning := untested(library):
        logging.getLogger("weightsync.sources").warning("%s", warning)
