"""A store in S3, which moto's server stands for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.stores.store_rig import FILES, Site, save, tensors
from weightsync.errors import StoreError
from weightsync.stores.history import History
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.publishing import publish

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("moto") and importlib.util.find_spec("flask_cors")),
    reason="moto's server is not installed",
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        found = (re.search(r"Running on (http://127.0.0.1:\d+)", line) for line in process.stderr)
        url = next(match[1] for match in found if match)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield url
        process.kill()


@pytest.fixture(autouse=True)
def keys(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")


def test_versions_go_through_s3(tmp_path: Path) -> None:
    site = Site(tmp_path, "s3://bucket/policy")
    site.held["head"] = np.zeros((2000, 1200), np.float32)  # more than a part of an upload
    site.publish()
    site.follow("f")
    for _ in range(2):
        assert not site.publish().is_anchor
    assert site.follow("f").nbytes < 1e6
    site.follow("joins", 2)
    assert History(ObjectStore("s3://bucket/other")).newest == 0


def test_one_of_two_publishers_wins_in_s3(tmp_path: Path) -> None:
    site = Site(tmp_path, "s3://bucket/race")
    assert site.store.create("versions/1", b"one")
    assert not site.store.create("versions/1", b"other")
    assert site.store.read("versions/1") == b"one"


def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path, "s3://nobucket/policy")
    with pytest.raises(StoreError, match=r"^s3://nobucket/policy: versions: .*404 Not Found"):
        publish(site.store, save(tmp_path / "files", tensors()), site.copy)
    assert not (tmp_path / "copy" / "objects" / FILES[0]).exists()
