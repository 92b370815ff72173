"""The checks of `weightsync doctor`, one function per row.

None needs a GPU or a running Ray.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightsync.config import SyncConfig
from weightsync.engines import ENGINES, choose_engine
from weightsync.engines.serving.checks import installed, require_version, untested
from weightsync.errors import ConfigError, TransportError
from weightsync.readers import choose_protocol, rdma_devices
from weightsync.recipes.cluster import existing_cluster
from weightsync.recipes.doctor.doctor import Row
from weightsync.sources import tested
from weightsync.text import count_text, size_text

_PATIENCE_S = 30.0

version_of = tested.installed

MOONCAKE = tuple(f"mooncake-transfer-engine{build}" for build in ("", "-cuda13", "-non-cuda"))
"""Packages with Mooncake, one per build."""

VERBS = "libibverbs.so.1"


def diagnose() -> list[Row]:
    """Return all rows: first the installed things, then the way of bytes on each edge."""
    probes: list[Callable[[], Row]] = [
        python, pytorch, gpus, peer_access, nccl, allocator, shared_memory, locked_memory,
        rdma, mooncake, ray_package, ray_cluster,
    ]  # fmt: skip
    return [*(probe() for probe in probes), *engines(), *trainers(), *edges()]


def python() -> Row:
    """Check the interpreter."""
    return Row("python", f"{platform.python_version()} on {platform.machine()} {platform.system()}")


def pytorch() -> Row:
    """Check PyTorch and the CUDA that it was built for."""
    if not find_spec("torch"):
        return Row("torch", "not installed", "missing", "pip install torch")
    cuda = load_torch().version.cuda
    return Row("torch", f"{version_of('torch')}, built for {f'CUDA {cuda}' if cuda else 'CPUs'}")


def gpus() -> Row:
    """List the GPUs that PyTorch sees."""
    found = _gpus()
    if found:
        return Row("GPUs", f"{len(found)}: {', '.join(sorted(set(found)))}")
    if Path("/dev/nvidia0").exists():
        remedy = "install PyTorch's CUDA build, and look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Row("GPUs", "there, but PyTorch sees none", "warn", remedy)
    return Row("GPUs", "none: everything runs on CPUs")


def peer_access() -> Row:
    """Check that each GPU can map the others' memory, which direct copies need."""
    num_gpus = len(_gpus())
    if num_gpus < 2:
        return Row("peer access", "not needed: fewer than two GPUs")
    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    without = [pair for pair in pairs if not load_torch().cuda.can_device_access_peer(*pair)]
    if not without:
        return Row("peer access", f"between all {num_gpus} GPUs")
    found = f"not from {', '.join(f'{i} to {j}' for i, j in without[:4])}{' …' if len(without) > 4 else ''}"
    return Row("peer access", found, "warn", "updates between them are broadcast; see nvidia-smi topo -p2p r")


def nccl() -> Row:
    """Compare the NCCL that moves weights, through CuPy, with PyTorch's."""
    if not _gpus():
        return Row("cupy, NCCL", "not needed: no GPUs")
    major = (load_torch().version.cuda or "13").partition(".")[0]
    remedy = f"pip install 'weightsync[cuda{major}]'"
    try:
        ours, theirs = importlib.import_module("weightsync.memory.cuda").nccl_versions()
    except (ImportError, TransportError) as error:
        return Row("cupy, NCCL", str(error).partition("\n")[0], "missing", remedy)
    package = f"cupy-cuda{major}x"
    if not version_of(package):
        return Row("cupy, NCCL", f"not {package}, which CUDA {major} needs", "missing", remedy)
    if ours != theirs:
        found = f"{package} {version_of(package)} with NCCL {ours}, but PyTorch has {theirs}"
        return Row("cupy, NCCL", found, "warn", f"pip install nvidia-nccl-cu{major}=={theirs}")
    return Row("cupy, NCCL", f"{package} {version_of(package)}, NCCL {ours} as PyTorch has")


def allocator() -> Row:
    """Check for expandable segments, whose memory cannot be shared between processes."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    told = [name for name in names if "expandable_segments:true" in os.environ.get(name, "").lower()]
    if told:
        remedy = f"unset it in {told[0]}, else weights are copied before they are read"
        return Row("allocator", "expandable segments", "warn", remedy)
    return Row("allocator", "PyTorch's default")


def shared_memory() -> Row:
    """Check shared memory, which CPU slots and snapshots use."""
    path, wanted = Path("/dev/shm"), SyncConfig().max_staging_bytes
    if not path.is_dir():
        return Row("shared memory", "no /dev/shm", "missing", "mount a tmpfs there")
    stat = os.statvfs(path)
    found = f"{size_text(stat.f_bavail * stat.f_frsize)} of {size_text(stat.f_blocks * stat.f_frsize)} free"
    if stat.f_bavail * stat.f_frsize < wanted:
        remedy = f"{size_text(wanted)} may be staged: docker run --shm-size, or lower sync.max_staging_bytes"
        return Row("shared memory", found, "warn", remedy)
    return Row("shared memory", found)


def locked_memory() -> Row:
    """Check the limit of page-locked memory, which RDMA registers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Row("locked memory", "unlimited")
    if rdma_devices():
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1: RDMA registers snapshots"
        return Row("locked memory", f"at most {size_text(soft)}", "warn", remedy)
    return Row("locked memory", f"at most {size_text(soft)}; enough without RDMA")


def rdma() -> Row:
    """List RDMA devices, and check the library by which NCCL and Mooncake use them."""
    found = ", ".join(rdma_devices())
    if not found:
        return Row("RDMA", "no device: other hosts are read over TCP")
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        remedy = f"apt-get install ibverbs-providers: without {VERBS}, NCCL uses TCP"
        return Row("RDMA", found, "warn", remedy)
    return Row("RDMA", found)


def mooncake() -> Row:
    """Check Mooncake, which reads other hosts' memory."""
    found = next(filter(None, map(version_of, MOONCAKE)), "")
    if found:
        return Row("mooncake", found)
    if rdma_devices():
        remedy = "pip install 'weightsync[mooncake]', to read other hosts over RDMA"
        return Row("mooncake", "not installed", "warn", remedy)
    return Row("mooncake", "not installed: other hosts are read over ZeroMQ")


def ray_package() -> Row:
    """Check Ray."""
    found = version_of("ray")
    if _release(found) < (2, 50):
        return Row("ray", found or "not installed", "missing", "pip install 'ray[default]>=2.50'")
    return Row("ray", found)


def ray_cluster() -> Row:
    """Check a run's cluster in another process, since Ray ends a process in which it fails."""
    address = existing_cluster()
    if not address:
        return Row("ray cluster", "RAY_ADDRESS is not set: a run starts one of its own")
    code = (
        "import json, logging, ray; ray.init(logging_level=logging.ERROR, log_to_driver=False);"
        "print(json.dumps([len(ray.nodes()), ray.cluster_resources()])); ray.shutdown()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        remedy = (
            "call ray start --head there, set RAY_AUTH_MODE=token if it asks for one, or unset RAY_ADDRESS"
        )
        return Row("ray cluster", f"{address} does not answer", "missing", remedy)
    num_nodes, resources = json.loads(done.stdout.splitlines()[-1])
    counts = [count_text(int(resources.get(kind, 0)), kind) for kind in ("CPU", "GPU")]
    return Row("ray cluster", f"{address}: {', '.join([count_text(num_nodes, 'node'), *counts])}")


def engines() -> Iterator[Row]:
    """Check each kind of engine, and the choice of ``auto``."""
    torch_on = "cuda" if _gpus() else "cpu"
    for kind in ENGINES:
        name, found = f"engine {kind}", " ".join(installed(kind)).strip()
        try:
            require_version(kind)
            yield _library(name, found, untested(kind, torch_on if kind == "torch" else "cuda"))
        except ConfigError as error:
            yield Row(name, found, "warn", f"it is refused; {error.remedy}")
    try:
        kind, _ = choose_engine("auto")
        require_version(kind)
        yield Row("engine auto", kind)
    except ConfigError as error:
        yield Row("engine auto", "none", "missing", error.remedy)


def trainers() -> Iterator[Row]:
    """Check the training libraries for which there is a source."""
    for library in tested.TESTED:
        yield _library(f"trainer {library}", tested.installed(library), tested.untested(library))


def _library(name: str, found: str, warning: str) -> Row:
    if warning:
        return Row(name, found, "warn", f"it may work; {warning}")
    return Row(name, found or "not installed")


def edges() -> Iterator[Row]:
    """Show the way of bytes on each edge."""
    on_gpus = moves_on_gpus()
    direct = (
        "direct reads between GPUs of this host, else " if on_gpus and peer_access().state == "ok" else ""
    )
    published = "read in place through CUDA IPC; offloaded: pinned host memory"
    written = "a kernel into live parameters through CUDA IPC"
    yield Row("trainer → holder", published if on_gpus else "shared memory")
    yield Row("holder → holder", f"{direct}NCCL" if on_gpus else "gloo")
    yield Row("holder → engine", written if on_gpus else "shared memory")
    yield Row("refill", f"mapped on this host, {choose_protocol('auto')} from other hosts")


def moves_on_gpus() -> bool:
    """Return True if weights move between GPUs, through CuPy and CUDA IPC."""
    return bool(_gpus()) and nccl().state != "missing"


def _gpus() -> list[str]:
    if not find_spec("torch"):
        return []
    cuda = load_torch().cuda
    return [cuda.get_device_name(index) for index in range(cuda.device_count())]


def load_torch() -> Any:  # noqa: ANN401 (a module)
    """Import torch, which only the rows about GPUs need."""
    return importlib.import_module("torch")


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
