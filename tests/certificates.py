"""Files of TLS for tests."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from weightsync.config import TlsFiles
from weightsync.protocol import certificates


def run_files(folder: Path) -> TlsFiles:
    """Make the files of a run."""
    (made,), _ = certificates.make_keys(folder, [], 1)
    return TlsFiles.within(str(made))


def expired_files(folder: Path) -> TlsFiles:
    """Make files that expired yesterday."""
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    with mock.patch.object(certificates, "now", return_value=before):
        return run_files(folder)


def files_and_late_files(folder: Path) -> tuple[TlsFiles, TlsFiles]:
    """Make two hosts' files of one CA. The certificate of the second host has expired."""
    make = certificates.certificate

    def made(name: str, issuer: str, key: Any, issuer_key: Any, until: Any, *, is_ca: bool) -> Any:
        if name == "late":
            until = certificates.now() - datetime.timedelta(minutes=1)
        return make(name, issuer, key, issuer_key, until, is_ca=is_ca)

    with mock.patch.object(certificates, "certificate", made):
        (own, late), _ = certificates.make_keys(folder, ["own", "late"], 1)
    return TlsFiles.within(str(own)), TlsFiles.within(str(late))
