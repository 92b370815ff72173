"""A store in S3, which moto's server stands for."""

from __future__ import annotations

import importlib.util
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class _Direction:
    """All bytes that share a link in one direction."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def carry(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(1 << 16):
                with self._lock:
                    self._free = max(self._free, time.monotonic()) + len(data) / self._rate
                    arrives = self._free
                time.sleep(max(0.0, arrives - time.monotonic()))
                there.sendall(data)
        for end in (here, there):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_link(server: str, rate: float) -> Iterator[str]:
    """Yield a URL behind which the server is, at `rate` bytes per second in each direction."""
    host, _, port = server.removeprefix("http://").rpartition(":")
    up, down = _Direction(rate), _Direction(rate)

    class Link(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as there:
                back = threading.Thread(target=down.carry, args=(there, self.request))
                back.start()
                up.carry(self.request, there)
                back.join()

    with socketserver.ThreadingTCPServer((host, 0), Link) as link:
        link.daemon_threads = True
        threading.Thread(target=link.serve_forever, daemon=True).start()
        yield f"http://{host}:{link.server_address[1]}"
        link.shutdown()


@pytest.mark.faults
def test_a_slow_link_carries_whole_files(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has seconds in place of half a minute, and 96 MB take ten seconds each way."""
    with slow_link(server, 10e6) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_TIMEOUT", "3s")
        site = Site(tmp_path, "s3://bucket/slow")
        site.held["head"] = np.zeros((2000, 12000), np.float32)
        site.publish()
        monkeypatch.setenv("AWS_TIMEOUT", "0.5s")
        site.store = ObjectStore(site.url)
        site.follow("f")
