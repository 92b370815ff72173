"""A run whose connections between hosts speak TLS."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from tests.certificates import expired_files, run_files
from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.local_cluster import ROOT, forking_python
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, WeightSync

WIDTH = 64


class Fleet:
    """Two trainers and two engines, in processes of their own."""

    def __init__(self, **settings: Any) -> None:
        self.trainers = [spawn(Trainer, WIDTH, f"t{i}") for i in range(2)]
        self.engines = {f"e{i}": spawn(Engine, WIDTH, f"e{i}", f"t{2 + i}") for i in range(2)}
        limits = {"bucket_bytes": 8192, "timeout_s": patient(10), "heartbeat_s": patient(1)}
        self.sync = WeightSync(SyncConfig(**(limits | settings)))
        self.sync.register_trainers(self.trainers)
        self.sync.register_engines(self.engines, respawn=lambda name: spawn(Engine, WIDTH, name, "t3"))

    def update(self, version: int) -> None:
        ray.get([trainer.train.remote(version) for trainer in self.trainers])
        report = self.sync.update_weights(version)
        assert report.verified
        assert report.failures == {}
        self.check(version)

    def check(self, version: int) -> None:
        assert self.sync.engine_versions() == {"e0": version, "e1": version}
        wanted = ray.get(self.trainers[0].weights.remote())
        for engine in self.sync.engines().values():
            found = ray.get(engine.weights.remote())
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)

    def close(self) -> None:
        self.sync.close()
        for each in [*self.trainers, *self.sync.engines().values(), *self.engines.values()]:
            ray.kill(each)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    command = [forking_python(), "-m", "weightsync.recipes.cli", "keys", tmp_path / "tls"]
    subprocess.run(command, cwd=ROOT, check=True)
    return tmp_path / "tls"


@pytest.fixture
def fleet(folder: Path) -> Iterator[Fleet]:
    made = Fleet(tls=str(folder))
    yield made
    made.close()


def pid(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def certificate(stream: ssl.SSLSocket) -> bytes | None:
    """Return the certificate that the other end shows, if any."""
    with suppress(OSError):
        stream.do_handshake()
        return stream.getpeercert(binary_form=True)
    return None


def show(own: bytes, pids: Iterable[int]) -> bool:
    """Whether one of these processes has a port at which it shows a certificate: most ports say nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    here = ray.util.get_node_ip_address()
    streams = []
    with ExitStack() as opened:
        for each in [at for number in pids for at in psutil.Process(number).net_connections("tcp")]:
            if each.status == psutil.CONN_LISTEN:
                host = here if each.laddr.ip in ("0.0.0.0", "::") else each.laddr.ip
                with suppress(OSError):
                    plain = socket.create_connection((host, each.laddr.port), patient(10))
                    wrapped = context.wrap_socket(plain, do_handshake_on_connect=False)
                    streams.append(opened.enter_context(wrapped))
        with ThreadPoolExecutor(len(streams)) as threads:
            asked = [threads.submit(certificate, stream) for stream in streams]
            try:
                return any(answer.result() == own for answer in as_completed(asked))
            finally:
                for stream in streams:  # ends waits for answers
                    with suppress(OSError):
                        socket.socket.shutdown(stream, socket.SHUT_RDWR)


def test_versions_arrive_and_a_killed_engine_is_filled(fleet: Fleet, folder: Path) -> None:
    fleet.sync.connect()
    for version in (1, 2, 3):
        fleet.update(version)
    own = ssl.PEM_cert_to_DER_cert((folder / "certificate.pem").read_text())
    holders = [*map(pid, fleet.sync.holders().values())]
    assert show(own, [os.getpid()]), "the driver's port for nodes speaks TLS"
    assert show(own, holders), "and so does the store where holders meet"
    os.kill(pid(fleet.engines["e1"]), signal.SIGKILL)
    report = fleet.sync.update_weights(4)
    assert report.engines["e0"] == 4
    fleet.sync.settle(patient(60))
    assert fleet.sync.heals[-1].engine == "e1"
    assert fleet.sync.engines()["e1"] is not fleet.engines["e1"]
    fleet.check(4)
    fleet.update(5)


def test_an_expired_certificate_is_named_when_a_run_connects(tmp_path: Path) -> None:
    expired_files(tmp_path)
    fleet = Fleet(tls=str(tmp_path))
    with pytest.raises(ConfigError, match=r"sync.tls.ca.*expired on .*weightsync keys"):
        fleet.sync.connect()
    fleet.close()


def test_a_host_without_the_files_is_named(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    fleet = Fleet(tls=files)
    fleet.sync.connect()
    Path(files.key).unlink()
    late = spawn(Engine, WIDTH, "e2", "t4")
    with pytest.raises(Exception, match=r"e2.*sync.tls.key.*each host needs the file at this path"):
        fleet.sync.add_engine("e2", late)
    ray.kill(late)
    fleet.close()
