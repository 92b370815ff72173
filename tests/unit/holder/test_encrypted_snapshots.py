"""With TLS, holders serve copies to other hosts by a protocol that encrypts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import run_files
from weightsync.config import TlsFiles
from weightsync.holder.holder import Holder


@pytest.mark.parametrize("asked", ["auto", "zeromq"])
@pytest.mark.parametrize("encrypts", [True, False])
def test_copies_are_served_by_curve_if_there_are_files(tmp_path: Path, asked: str, encrypts: bool) -> None:
    files: TlsFiles | None = run_files(tmp_path) if encrypts else None
    holder = Holder("holder 0", "127.0.0.1", tls=files)
    assert holder.ready() == ("holder 0", "gloo", None, files)
    holder.serve_snapshots(asked, "")
    assert holder.snapshot_store
    protocol = holder.snapshot_store.reserve(0, 64).protocol
    holder.close()
    assert (protocol == "curve") == encrypts
