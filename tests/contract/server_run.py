"""Real servers that join; run by test_server.py, and on a GPU by test_servers_on_gpu.py.

    python -m tests.contract.server_run FOLDER [vllm | sglang]

The folder is on the path of the servers' processes, too, with the entry points of this project.
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
from importlib import metadata
from pathlib import Path

import ray
import requests

from tests.contract.joined_rank import ON_GPU, TARGETS, JoinedRank
from tests.contract.trl_run import PROMPTS, free_port, said, said_by, write_vllm_info
from tests.fleets.foreign_actors import SureTrainer, TransformersTrainer
from tests.fleets.served import APART, can_be_apart
from tests.models import build_tiny_qwen3
from tests.pages import blocks
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

TOKEN = "a-long-secret-of-this-fleet"
NUM_UPDATES = 20
SMALL = {
    "vllm": [
        *("--max-model-len", "64", "--enforce-eager", "--gpu-memory-utilization", "0.2"),
        *("--kv-cache-memory-bytes", str(1 << 26), "--dtype", "auto" if ON_GPU else "float32"),
        *("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"),
    ],
    "sglang": [
        *("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--max-total-tokens", "8192", "--max-running-requests", "8"),
        *("--enable-lora", "--max-loras-per-batch", "3", "--max-lora-rank", "8"),
        *("--lora-target-modules", *TARGETS),
        *(
            # In bfloat16 an adapter's tokens differ if a prefix is cached.
            ("--attention-backend", "triton", "--mem-fraction-static", "0.3", "--disable-radix-cache")
            if ON_GPU
            else (
                *("--attention-backend", "torch_native", "--device", "cpu", "--dtype", "float32"),
                *("--lora-backend", "torch_native"),
            )
        ),
    ],
}


class Server:
    """The page's server, in a process group of its own."""

    def __init__(self, kind: str, model: Path, driver: str, apart: bool, token: str = TOKEN) -> None:
        page = blocks("docs/servers.md", "sh")[["vllm", "sglang"].index(kind)]
        port = free_port()
        words = {"/models/qwen3-0.6b": str(model), "8000": str(port), "10.0.0.1:29500": driver, "\\\n": ""}
        words[TOKEN] = token
        for word, here in words.items():
            page = page.replace(word, here)
        export, serve = page.strip().splitlines()
        module = ["-m", "vllm.entrypoints.cli.main"] if kind == "vllm" else []  # there it is in the page
        program = [sys.executable, *module, *shlex.split(serve)[1:], *SMALL[kind]]
        self._command = [*(APART if apart else ()), "env", *shlex.split(export)[1:], *program]
        self._kind, self.url = kind, f"http://{driver.partition(':')[0]}:{port}"
        self.start()

    def said(self) -> list[list[int]]:
        """Return the server's greedy tokens. It may join before it listens."""
        deadline = time.monotonic() + patient(30)
        while True:
            try:
                return self._said()
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def _said(self) -> list[list[int]]:
        if self._kind == "vllm":
            return said(self.url)
        return [each["output_ids"] for each in self._generate().json()]

    def _generate(self, **more: str) -> requests.Response:
        body = {"input_ids": PROMPTS, "sampling_params": {"max_new_tokens": 16, "temperature": 0}, **more}
        return requests.post(f"{self.url}/generate", json=body, timeout=patient(30))

    def adapted(self) -> tuple[int, list[list[int]]]:
        """Return the version of adapter math that answers, and its greedy tokens."""
        if self._kind == "sglang":
            answers = self._generate(lora_path="math").json()
            ((version,),) = {tuple(each["meta_info"]["adapter_versions"].values()) for each in answers}
            return version, [each["output_ids"] for each in answers]
        name, tokens = said_by(self.url, model="math")
        assert name.startswith("math@")
        return int(name.removeprefix("math@").partition(" in ")[0]), tokens

    def is_adapted(self) -> bool:
        """Return True if the server has a version of adapter math."""
        if self._kind == "sglang":
            return self._generate(lora_path="math").ok
        body = {"model": "math", "prompt": [1], "max_tokens": 1}
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=patient(30)).ok

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, start_new_session=True)

    def has_ended(self) -> bool:
        """Wait until it ends by itself, for a while."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patient(60)) != 0
        return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Asking:
    """Asks servers for tokens all the time. Counts the answers."""

    def __init__(self, servers: list[Server]) -> None:
        self.counts, self.over = dict.fromkeys(servers, 0), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[each]) for each in servers]
        for each in self._threads:
            each.start()

    def _ask(self, server: Server) -> None:
        while not self.over.is_set():
            server.said()
            self.counts[server] += 1

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
        assert server.said() == wanted, (server.url, version)


class AskingForAdapter(Asking):
    """Asks for an adapter. Each answer has the tokens of the version that it names."""

    def __init__(self, servers: list[Server]) -> None:
        self.answers: list[tuple[int, list[list[int]]]] = []
        super().__init__(servers)

    def _ask(self, server: Server) -> None:
        while not self.over.is_set():
            self.answers.append(server.adapted())
            self.counts[server] += 1


def adapt(sync: WeightSync, rank: JoinedRank, servers: list[Server]) -> list[list[int]]:
    """Servers get a rank's adapter five times, while requests for it run. Returns its tokens.

    On a GPU the rank's kernels round otherwise than the server's: there a version's first answer counts.
    """
    plain, wanted = servers[0].said(), dict[int, list[list[int]]]()
    sync.register_adapter("math", 1)
    for version in range(1, 6):
        trained = rank.said()
        report = sync.update_adapter("math")
        assert report.verified
        assert set(report.engines.values()) == {version}, report
        answer = servers[0].adapted()[1] if ON_GPU else trained
        assert answer not in [plain, *wanted.values()]
        wanted[version] = answer
        for server in servers:
            found = server.adapted()
            assert found == (version, answer), (server.url, found, version, answer)
        if version == 1:
            asking = AskingForAdapter(servers)
    asking.end()
    assert min(asking.counts.values()) > 0
    for version, tokens in asking.answers:
        assert tokens == wanted[version], version
    assert [server.said() for server in servers] == [plain] * len(servers)
    return wanted[5]


def gets_it_back(server: Server, tokens: list[list[int]]) -> None:
    """A server that was started again gets the adapter's version back, after the base."""
    deadline = time.monotonic() + patient(60)
    while not server.is_adapted():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.adapted() == (5, tokens)


def join(sync: WeightSync, rank: JoinedRank, servers: list[Server]) -> None:
    """Servers get the weights of a script that joins a new driver, three times."""
    sync.register_trainers(1)
    sync.register_engines({each.url: each.url for each in servers})
    sync.connect()
    for _ in range(3):
        wanted = rank.said()
        assert sync.update_weights().verified
        for server in servers:
            assert server.said() == wanted, server.url


def write_entry_points(folder: Path) -> None:
    """Have servers find this project's plug-in where it is not installed."""
    if metadata.entry_points(group="sglang.srt.plugins", name="weightsync"):
        return
    info = folder / "weightsync_plugins-0.dist-info"  # an older weightsync may be installed
    info.mkdir()
    (info / "METADATA").write_text("Name: weightsync_plugins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nweightsync = weightsync.plugins:register_sglang\n"
    )


def save_model(folder: Path) -> type[TransformersTrainer]:
    """Save a model that servers can serve here. Returns its trainer."""
    if not ON_GPU:
        build_tiny_qwen3(folder)
        return TransformersTrainer
    from tests.gpu.qwen3_models import save_qwen3

    save_qwen3(folder, "untied", 0)
    return SureTrainer


def ends_without_a_token(server: Server) -> None:
    """A server that cannot join does not serve the weights that it has."""
    assert server.has_ended()
    server.kill()


def main(folder: Path, kind: str) -> None:
    if kind == "sglang":
        write_entry_points(folder)
    elif not ON_GPU:
        write_vllm_info(folder)
    trainer_class = save_model(folder / "model")
    os.environ["WEIGHTSYNC_TOKEN"] = TOKEN
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = SyncConfig(
        join_port=free_port(),
        timeout_s=patient(30),
        connect_timeout_s=patient(180),
        stage="host" if ON_GPU else "none",  # else the only server has nobody to be filled from
    )
    driver = f"{ray.util.get_node_ip_address()}:{config.join_port}"
    ends_without_a_token(Server(kind, folder / "model", driver, False, token="short"))
    apart = [False] if ON_GPU else [False, can_be_apart()]  # a GPU has one engine
    servers = [Server(kind, folder / "model", driver, each) for each in apart]
    make = ray.remote(num_cpus=0, num_gpus=0.1 if ON_GPU else 0)(trainer_class)
    ranks: list[JoinedRank] = []
    env = os.environ | {"WEIGHTSYNC_JOIN": driver}
    trainer = make.remote(str(folder / "model"), "cuda" if ON_GPU else "cpu")
    try:
        with WeightSync(config) as sync:
            sync.register_trainers([trainer], model="actor.model")
            sync.register_engines({f"e{i}": each.url for i, each in enumerate(servers)})
            sync.connect()
            update(sync, trainer, servers, 1)
            asking = Asking(servers)
            for version in range(2, NUM_UPDATES):
                ray.get(trainer.says.remote(version))
                assert sync.update_weights(version).verified
            asking.end()
            assert min(asking.counts.values()) > 0
            update(sync, trainer, servers, NUM_UPDATES)

            ranks.append(JoinedRank(folder / "model", "adapter", NUM_UPDATES, env))
            adapted = adapt(sync, ranks[0], servers)
            name, last = [*sync.engines()][-1], servers[-1]
            last.kill()
            wanted, deadline = ray.get(trainer.says.remote(NUM_UPDATES)), time.monotonic() + patient(240)
            while name in sync.serving():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            last.start()
            while name not in sync.serving():
                assert time.monotonic() < deadline, sync.engine_states()
                time.sleep(0.5)
            assert last.said() == wanted
            gets_it_back(last, adapted)
            update(sync, trainer, servers, NUM_UPDATES + 1)
        ranks.append(JoinedRank(folder / "model", "base", NUM_UPDATES + 1, env))
        with WeightSync(config) as sync:
            join(sync, ranks[1], servers)
    finally:
        for rank in ranks:
            rank.kill()
        for each in servers:
            each.kill()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or ["vllm"])
    os._exit(0)
