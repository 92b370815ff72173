"""TRL's GRPOTrainer against a real `vllm serve`; run by test_trl.py in an environment with TRL.

    python -m tests.contract.trl_run FOLDER

The folder is on the path of vLLM's processes too, with the entry points of this project.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import requests
import torch

from tests.models import build_tiny_qwen3, greedy, save_tokenizer
from tests.pages import blocks, run_block
from tests.patience import patient

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPTS = [[5, 6, 7], [200, 3, 90, 41], [11] * 6]
START_S, TIMEOUT_S = patient(60), patient(5)


@contextmanager
def serving(model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the page's server in a process group of its own. Ends it in the end."""
    (page,) = blocks("docs/trl.md", "sh")
    variable, vllm, *words = shlex.split(page.replace("/models/qwen3-0.6b", str(model)).replace("\\\n", ""))
    assert vllm == "vllm"
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    small = ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--port", str(port)]
    server = subprocess.Popen(["env", variable, *program, *words, *small], start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(port):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
        yield server
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _healthy(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=1).ok
    except requests.RequestException:
        return False


def said(url: str) -> list[list[int]]:
    """Return the server's greedy tokens."""
    return said_by(url)[1]


def said_by(url: str, **more: str) -> tuple[str, list[list[int]]]:
    """Return the name of the model that answers, and its greedy tokens."""
    body = {"prompt": PROMPTS, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **more}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=patient(30)).json()
    return answer["model"], [each["token_ids"] for each in answer["choices"]]


def train(model: Path, url: str, folder: Path) -> None:
    """Run the page's script. After each sync the server's greedy tokens are those of the model."""
    import trl

    class Watched(trl.GRPOTrainer):  # type: ignore[misc]
        def __init__(self, **arguments: object) -> None:
            super().__init__(**arguments)
            self.seen: list[list[list[int]]] = []
            self.sync, self.vllm_generation.sync_weights = self.vllm_generation.sync_weights, self.compare

        def compare(self) -> None:
            self.sync()
            self.seen.append(greedy(self.model.eval(), PROMPTS))
            self.model.train()
            assert said(url) == self.seen[-1], (
                f"not the trainer's tokens after {self.state.global_step} steps"
            )

    on_cpu = partial(
        trl.GRPOConfig,
        **{"use_cpu": True, "bf16": False, "learning_rate": 1e-2, "report_to": [], "save_strategy": "no"},
        vllm_group_port=free_port(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", Watched)
        patch.setattr(trl, "GRPOConfig", on_cpu)
        here = {"/models/qwen3-0.6b": str(model), "http://127.0.0.1:8000": url, "runs/trl": str(folder)}
        trainer = run_block("docs/trl.md", 0, {}, here)["trainer"]
    trainer.compare()
    assert trainer.state.global_step == 5
    assert len(trainer.seen) == 6
    assert all(old != new for old, new in zip(trainer.seen, trainer.seen[1:], strict=False))
    trainer.vllm_generation.vllm_client.close_communicator()


def fail(url: str, model: torch.nn.Module, server: subprocess.Popen[bytes]) -> None:
    """Errors name what is wrong, in time."""
    from weightsync.errors import ConfigError, TransportError
    from weightsync.plugins import trl

    def client(**replaced: object) -> trl.Client:
        made = trl.Client(url, group_port=free_port())
        made.timeout_s = TIMEOUT_S
        for name, value in replaced.items():
            setattr(made, name, lambda value=value: value)
        return made

    def params(then: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()
        if then:
            os.killpg(server.pid, then)

    shapes = [(name, "float32", list(each.shape)) for name, each in model.named_parameters()]

    with pytest.raises(ConfigError, match=r"'nccl'.*start it with --weight-transfer-config"):
        client(get_server_info={"weight_transfer_config": {"backend": "nccl"}}).init_communicator("cpu")
    with pytest.raises(ConfigError, match="None is not valid; start it with"):
        client(get_server_info={"weight_transfer_config": None}).init_communicator("cpu")
    with took(TIMEOUT_S), pytest.raises(TransportError, match=rf"{url}: .*rank 2 of 3"):
        client(get_world_size=2).init_communicator("cpu")
    with took(TIMEOUT_S / 2), pytest.raises(TransportError, match=rf"{url}: .*world_size: 1 is not valid"):
        client(get_world_size=0).init_communicator("cpu")
    ours = client()
    ours.init_communicator("cpu")
    ours.update_named_params(shapes, params())
    assert said(url) == greedy(model, PROMPTS)
    with pytest.raises(TransportError, match=rf"{url}: .*left out model.norm.weight"):
        ours.update_named_params(shapes, (each for each in params() if each[0] != "model.norm.weight"))
    ours.init_communicator("cpu")
    with took(TIMEOUT_S), pytest.raises(TransportError, match=rf"{url}: .*rank 1 of 2"):
        ours.update_named_params(shapes, params(signal.SIGSTOP))
    os.killpg(server.pid, signal.SIGCONT)
    ours.init_communicator("cpu")
    ours.update_named_params(shapes, params())
    assert said(url) == greedy(model, PROMPTS)
    with took(TIMEOUT_S), pytest.raises(TransportError, match=rf"vLLM server {url}: "):
        ours.update_named_params(shapes, params(signal.SIGKILL))


@contextmanager
def took(most_s: float) -> Iterator[None]:
    """Expect the block to end within `most_s` and what an error needs to be found."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < most_s + patient(2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_vllm_info(folder: Path) -> None:
    """Have TRL and `vllm serve` find vllm-cpu: they look for a distribution called vllm."""
    info = folder / "vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n")


def main(folder: Path) -> None:
    write_vllm_info(folder)
    path, port = folder / "model", free_port()
    model = build_tiny_qwen3(path)
    save_tokenizer(path, [0])
    with serving(path, port) as server:
        train(path, f"http://127.0.0.1:{port}", folder / "runs")
        fail(f"http://127.0.0.1:{port}", model, server)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # An exit may abort while gloo's threads wait for the server that was killed.
    os._exit(0)
