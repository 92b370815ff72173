"""A real engine and trainers on the same GPUs, for `bench_latency`.

Updates run by the engine's own calls, or by ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.cluster import kill, spawn
from benchmarks.latency_engines import ENGINES
from benchmarks.latency_trainer import LatencyTrainer
from benchmarks.models import Tensor, model_of, save_config, shape_of
from benchmarks.updates import Round, WrongWeightsError
from weightsync import SyncConfig, WeightSync
from weightsync.plan import RankLayout

__all__ = ["ENGINES_ENV", "ON_CPU", "Layers", "Rig", "on_gpus", "start"]

ENGINES_ENV = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that GPUs have nvidia-smi's numbers
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # trainers start at the same time
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ON_CPU: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "bfloat16"},
    "vllm": {"max_model_len": 128, "max_num_seqs": 4},
    "sglang": {
        "device": "cpu",
        "disable_cuda_graph": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": 16384,
        "max_running_requests": 16,
    },
}

Layers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rig:
    """One engine and its trainers. `layouts` has the layouts of the engine's ranks."""

    kind: str
    tensors: Sequence[Tensor]
    trainers: Sequence[ActorHandle[Any]]
    engine: ActorHandle[Any]
    layouts: Sequence[RankLayout]
    sync: WeightSync

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_live(self) -> bool:
        """True if the engine's live weights can be read, not only the loader's input."""
        return all(layout.buffers for layout in self.layouts)

    @property
    def has_own_way(self) -> bool:
        """True if the engine has an own way of updates and readable live weights."""
        return self.kind in ("sglang", "vllm") and self.is_live

    def prepare(self, version: int, fraction: float = 1.0) -> None:
        """Write `version` to the trainers, or change a fraction by it, and poison the engine."""
        if fraction == 1.0:
            ray.get([trainer.change.remote(version) for trainer in self.trainers])
        else:
            ray.get([trainer.touch.remote(version, fraction) for trainer in self.trainers])
        if self.is_live:
            ray.get(self.engine.probe.remote("poison"))

    def wrong(self, version: int, touched: Mapping[int, float] = MappingProxyType({})) -> int:
        """Count the engine's elements that differ from `version`, and from changes by `touched` versions."""
        if not self.is_live:
            return 0
        args = [(layout, self.tensors, version, dict(touched)) for layout in self.layouts]
        return sum(ray.get(self.engine.probe.remote("wrong", args)))

    def load_code(self) -> None:
        """Make trainers import the code for the engine's own ways."""
        ray.get([trainer.load_code.remote(self.kind) for trainer in self.trainers])

    def connect(self) -> None:
        """Connect, before the first of our own updates."""
        self.sync.register_trainers(self.trainers)
        self.sync.register_engines({self.kind: self.engine})
        self.sync.connect()

    def ours(self) -> Round:
        """Run one update by us. Afterwards, untimed, holders copy snapshots."""
        started = time.perf_counter()
        report = self.sync.update_weights(self.sync.version + 1)
        seconds = time.perf_counter() - started
        self.sync.settle(60)
        if not report.verified:
            raise WrongWeightsError(str(report))
        return Round(self.sync.version, seconds, report)

    def loop(self) -> Round:
        """Run a turn of README's loop: an update, which is timed, and a rollout."""
        update = self.ours()
        ray.get(self.engine.generate.remote([[1, 2, 3]], {"max_tokens": 16, "temperature": 0.0}))
        return update

    def own(self, max_nbytes: int, *, flat: bool) -> Layers:
        """Run one update in the engine's own way.

        Returns seconds per layer, the total, and the calls.
        """
        if self.kind == "vllm":
            ray.get([each.open_vllm.remote(self.engine, max_nbytes, flat=flat) for each in self.trainers])
        started = time.perf_counter()
        if self.kind == "vllm":
            sent = [each.send_vllm.remote() for each in self.trainers]
        else:
            sent = [each.send_sglang.remote(self.engine, max_nbytes, flat=flat) for each in self.trainers]
        layers = dict(ray.get(sent)[0])
        finished = time.perf_counter()
        ray.get(self.engine.forget.remote())
        ended = time.perf_counter()
        layers["cache"] = ended - finished
        opened, loaded = max(map(_opened_and_loaded, ray.get(self.engine.probe.remote("seconds"))), key=sum)
        layers |= {"open": opened, "load": loaded, "way": layers.pop("engine") - opened - loaded}
        rest = ended - started - sum(seconds for name, seconds in layers.items() if name != "calls")
        return layers | {"rest": rest, "total": ended - started}


def _opened_and_loaded(rank: Layers) -> tuple[float, float]:
    """Return a rank's seconds of opening and of loading. vLLM's receiving includes loading."""
    loaded = rank.get("load", 0.0)
    return rank.get("open", 0.0) + max(0.0, rank.get("receive", 0.0) - loaded), loaded


@contextmanager
def start(
    kind: str,
    model: str,
    num_ranks: int,
    gpu_memory: float,
    quantization: Mapping[str, Any] = MappingProxyType({}),
    *,
    cpu: bool,
    config: SyncConfig,
    apart: bool = False,
    nodes: tuple[str, str] | None = None,
) -> Iterator[Rig]:
    """Start an engine with dummy weights, and a trainer rank on each GPU.

    `quantization` has options of a quantised engine. With `apart`, or with Ray's `nodes` for the trainers and
    for the engine, the engine is on the next GPUs.
    """
    tensors = model_of(model)
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        save_config(shape_of(model), Path(folder))
        gpus = [None if cpu else str(gpu) for gpu in range(num_ranks)]
        meeting = f"{folder}/meeting"
        slots = [f"slot-{rank}" if cpu else None for rank in range(num_ranks)]
        theirs, its = nodes or (None, None)
        trainers = [
            spawn(
                *(LatencyTrainer, tensors, rank, num_ranks, meeting, "device", slot),
                gpu=gpu,
                env=ENGINES_ENV,
                node=theirs,
            )
            for rank, (slot, gpu) in enumerate(zip(slots, gpus, strict=True))
        ]
        options = ON_CPU[kind] if cpu else on_gpus(kind, gpu_memory)
        options = {"tensor_parallel_size": num_ranks, **options}
        if quantization:
            options |= {"dtype": "bfloat16", **quantization}
        first = num_ranks if apart or nodes else 0
        visible = "" if cpu else ",".join(str(first + rank) for rank in range(num_ranks))
        engine = spawn(ENGINES[kind], folder, tensors, options, gpu=visible, env=ENGINES_ENV, node=its)
        layouts = [table.rank_layout() for table in ray.get(engine.sync_layout.remote())]
        with WeightSync(config) as sync:
            rig = Rig(kind, tensors, trainers, engine, layouts, sync)
            if rig.has_own_way:
                ray.get(engine.probe.remote("watch"))
            yield rig
        kill([*trainers, engine])


def on_gpus(kind: str, gpu_memory: float) -> dict[str, Any]:
    """Options on GPUs.

    No CUDA graphs: updates do not touch them, and capturing is slow.
    """
    if kind == "torch":
        return {"dtype": "bfloat16", "device": "cuda"}
    if kind == "vllm":
        return {
            "gpu_memory_utilization": gpu_memory,
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": 1024,
            "enforce_eager": True,
            "weight_transfer_config": {"backend": "ipc"},
        }
    return {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "mem_fraction_static": gpu_memory,
        "max_total_tokens": 8192,
        "max_running_requests": 8,
        "enforce_disable_flashinfer_allreduce_fusion": True,  # compiling it on first use takes minutes
    }
