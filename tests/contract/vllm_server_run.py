"""Real `vllm serve` processes that join; run by test_vllm_server.py in an environment with vLLM's server.

python -m tests.contract.vllm_server_run FOLDER
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import ray

from tests.contract.trl_run import free_port, said, write_vllm_info
from tests.fleets.foreign_actors import TransformersTrainer
from tests.fleets.served import APART, can_be_apart
from tests.models import build_tiny_qwen3
from tests.pages import blocks
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

TOKEN = "a-long-secret-of-this-fleet"
NUM_UPDATES = 20


class Server:
    """The page's server, in a process group of its own."""

    def __init__(self, model: Path, driver: str, apart: bool) -> None:
        (page,) = blocks("docs/servers.md", "sh")
        port = free_port()
        words = {"/models/qwen3-0.6b": str(model), "8000": str(port), "10.0.0.1:29500": driver, "\\\n": ""}
        for word, here in words.items():
            page = page.replace(word, here)
        export, serve = page.strip().splitlines()
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", *shlex.split(serve)[1:]]
        small = ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
        self._command = [*(APART if apart else ()), "env", *shlex.split(export)[1:], *program, *small]
        self.url = f"http://{driver.partition(':')[0]}:{port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, start_new_session=True)

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Asking:
    """Asks servers for tokens all the time. Counts the answers."""

    def __init__(self, urls: list[str]) -> None:
        self.counts, self.over = dict.fromkeys(urls, 0), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[url]) for url in urls]
        for each in self._threads:
            each.start()

    def _ask(self, url: str) -> None:
        while not self.over.is_set():
            said(url)
            self.counts[url] += 1

    def end(self) -> None:
        self.over.set()
        for each in self._threads:
            each.join()


def update(sync: WeightSync, trainer: ray.ActorHandle, servers: list[Server], version: int) -> None:
    wanted = ray.get(trainer.says.remote(version))
    report = sync.update_weights(version)
    assert report.verified
    assert set(report.engines.values()) == {version}, report
    for server in servers:
        assert said(server.url) == wanted, (server.url, version)


def main(folder: Path) -> None:
    write_vllm_info(folder)
    build_tiny_qwen3(folder / "model")
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = SyncConfig(join_port=free_port(), timeout_s=patient(30), connect_timeout_s=patient(180))
    driver = f"{ray.util.get_node_ip_address()}:{config.join_port}"
    servers = [Server(folder / "model", driver, apart) for apart in (False, can_be_apart())]
    trainer = ray.remote(num_cpus=0)(TransformersTrainer).remote(str(folder / "model"))
    try:
        with WeightSync(config) as sync:
            sync.register_trainers([trainer], model="actor.model")
            sync.register_engines({f"e{i}": each.url for i, each in enumerate(servers)})
            sync.connect()
            update(sync, trainer, servers, 1)
            asking = Asking([each.url for each in servers])
            for version in range(2, NUM_UPDATES):
                ray.get(trainer.says.remote(version))
                assert sync.update_weights(version).verified
            asking.end()
            assert min(asking.counts.values()) > 0
            update(sync, trainer, servers, NUM_UPDATES)

            servers[1].kill()
            wanted, deadline = ray.get(trainer.says.remote(NUM_UPDATES)), time.monotonic() + patient(240)
            while "e1" in sync.serving():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            servers[1].start()
            while "e1" not in sync.serving():
                assert time.monotonic() < deadline, sync.engine_states()
                time.sleep(0.5)
            assert said(servers[1].url) == wanted
            update(sync, trainer, servers, NUM_UPDATES + 1)
    finally:
        for each in servers:
            each.kill()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
