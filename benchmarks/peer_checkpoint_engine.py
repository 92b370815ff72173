"""checkpoint-engine's parameter servers and the consumers beside them, as actors.

Each server owns whole tensors, a contiguous part of the list, and every consumer is sent all of them
and copies its slice, as an inference engine's ``load_weights`` would. The process group is made once
(``auto_pg=False``) and the pinned pool is used again, so no update pays for either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.cluster import free_port, kill, spawn
from benchmarks.gpu_fleet import Destination
from benchmarks.models import Tensor
from benchmarks.values import fill
from weightsync.plan import Box

__all__ = ["CheckpointEngine", "start_checkpoint_engine"]

_NAME = "weights"
_SIZES_GB = (0.5, 1.0, 2.0, 4.0, 8.0)


class Consumer(Destination):
    """Plays the engine's worker of one GPU."""

    def load(self, path: str) -> None:
        """Take one update over the server's socket."""
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        update_weights_from_ipc(zmq.Context.instance(), path, 0, run=self._copy, post_hook=None)

    def _copy(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        boxes = {tensor.name: box for tensor, box in self.held}
        for name, whole in weights:
            self.live[name].copy_(whole[boxes[name].slices()])


class Server:
    """One rank of the parameter servers."""

    def __init__(
        self,
        model: Sequence[Tensor],
        rank: int,
        num_ranks: int,
        port: int,
        source: str,
        beside: ActorHandle[Any],
    ) -> None:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        from checkpoint_engine.ps import ParameterServer

        self._consumer = beside
        self._server = ParameterServer(auto_pg=False)
        self._server.init_process_group()
        share = -(-len(model) // num_ranks)
        self._tensors = model[rank * share : (rank + 1) * share]
        device = "cuda" if source == "device" else "cpu"
        self._data = {
            t.name: torch.empty(t.shape, dtype=torch.bfloat16, device=device) for t in self._tensors
        }
        self._failed: BaseException | None = None

    def change(self, version: int) -> None:
        """Write `version` into every element."""
        wholes = (Box((0,) * len(tensor.shape), tensor.shape) for tensor in self._tensors)
        fill(zip(self._tensors, wholes, self._data.values(), strict=True), version)
        torch.cuda.synchronize()

    def limit(self, gigabytes: float) -> None:
        """The largest bucket of later updates."""
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(gigabytes)

    def register(self) -> None:
        """Copy the tensors into the pinned pool."""
        self._server.register_checkpoint(_NAME, named_tensors=self._data, use_shared_memory_pool=True)

    def gather(self) -> None:
        """Tell each other what there is."""
        self._server.gather_metas(_NAME)

    def update(self) -> None:
        """Send everything to every consumer; returns when the own one has loaded it."""
        self._failed = None
        self._server.update(_NAME, self._tell_consumer)
        if self._failed is not None:
            raise self._failed

    def unregister(self) -> None:
        """Let the next version take the pool."""
        self._server.unregister_checkpoint(_NAME)

    def _tell_consumer(self, paths: list[tuple[str, str]]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        own = dict(paths)[self._server._device_uuid]
        try:
            ray.get(self._consumer.load.remote(own))
        except Exception as error:  # noqa: BLE001 (its thread would swallow it)
            self._failed = error


@dataclass(slots=True)
class CheckpointEngine:
    """The driver's handles."""

    servers: list[ActorHandle[Any]]
    consumers: list[ActorHandle[Any]]

    def prepare(self, version: int) -> None:
        """The servers hold `version`, the consumers nothing that is right."""
        ray.get([server.change.remote(version) for server in self.servers])
        ray.get([consumer.poison.remote() for consumer in self.consumers])

    def wrong(self, version: int) -> int:
        """Elements of the consumers that differ from `version`."""
        return sum(ray.get([consumer.wrong.remote(version) for consumer in self.consumers]))

    def update(self) -> dict[str, float]:
        """Seconds of ``register``, ``gather`` and ``update``, each until the last rank is done."""
        seconds = {}
        for phase in ("register", "gather", "update"):
            started = time.perf_counter()
            ray.get([getattr(server, phase).remote() for server in self.servers])
            seconds[phase] = time.perf_counter() - started
        ray.get([server.unregister.remote() for server in self.servers])
        return seconds

    def limit(self, gigabytes: float) -> None:
        """The largest bucket of later updates."""
        ray.get([server.limit.remote(gigabytes) for server in self.servers])

    def sweep(self) -> dict[float, float]:
        """Seconds of the better of two warm updates, for each bucket size."""
        self.limit(_SIZES_GB[0])
        self.update()
        seconds = {}
        for size in _SIZES_GB:
            self.limit(size)
            seconds[size] = min(self.update()["update"] for _ in range(2))
        return seconds

    def close(self) -> None:
        kill([*self.servers, *self.consumers])


def start_checkpoint_engine(model: Sequence[Tensor], gpus: Sequence[str], source: str) -> CheckpointEngine:
    """A server and a consumer on each GPU."""
    port, num_ranks = free_port(), len(gpus)
    consumers = [spawn(Consumer, model, i, num_ranks, gpu=gpu) for i, gpu in enumerate(gpus)]
    servers = [
        spawn(Server, model, i, num_ranks, port, source, consumers[i], gpu=gpu) for i, gpu in enumerate(gpus)
    ]
    return CheckpointEngine(servers, consumers)
