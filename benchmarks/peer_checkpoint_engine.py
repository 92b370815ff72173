"""checkpoint-engine alone, one process per GPU, started by torchrun as in checkpoint-engine's examples.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m benchmarks.peer_checkpoint_engine --part '{"gib": 16, "source": "device", "rounds": 7}'

Every rank owns whole tensors, a contiguous part of the list. The rank's consumer process receives all tensors
and copies slices, like an inference engine's ``load_weights``. The process group is made once
(``auto_pg=False``) and the pinned pool is reused, so no update pays for them. checkpoint-engine's updates
collect garbage, so objects that this benchmark imported are frozen and cost the updates nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import multiprocessing

from benchmarks.gpu_fleet import Destination, Model
from benchmarks.isolate import asked, emit, stage
from benchmarks.models import Tensor, model_of
from benchmarks.spmd import Control
from benchmarks.updates import NUM_WARM, check, new_version, spread
from benchmarks.values import fill
from weightsync.plan import Box

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NAME = "weights"
_SIZES_GB = (0.5, 1.0, 2.0, 4.0, 8.0)
_PHASES = ("register", "gather", "update")


class Consumer(Destination):
    """Stands for an engine's worker on one GPU."""

    def load(self, path: str) -> None:
        """Take one update from the server's socket."""
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        update_weights_from_ipc(
            zmq.Context.instance(), path, self.device.index, run=self._copy, post_hook=torch.cuda.synchronize
        )

    def _copy(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        boxes = {tensor.name: box for tensor, box in self.held}
        for name, whole in weights:
            self.live[name].copy_(whole[boxes[name].slices()])


def consume(calls: Connection, model: Model, rank: int, num_ranks: int) -> None:
    """Answer the calls of the server until it sends None."""
    torch.cuda.set_device(rank)
    consumer = Consumer(model, rank, num_ranks)
    _spare_the_collector()
    calls.send(None)
    while call := calls.recv():
        name, args = call
        calls.send(getattr(consumer, name)(*args))


class Rank:
    """One parameter server with a consumer."""

    def __init__(self, model: Model, source: str, rank: int, num_ranks: int) -> None:
        from checkpoint_engine.ps import ParameterServer

        context = multiprocessing.get_context("spawn")
        self._consumer, calls = context.Pipe()
        self.process = context.Process(target=consume, args=(calls, model, rank, num_ranks), daemon=True)
        self.process.start()
        self._server = ParameterServer(auto_pg=False)
        self._server.init_process_group()
        share = -(-len(model) // num_ranks)
        self._tensors: list[Tensor] = list(model[rank * share : (rank + 1) * share])
        device = torch.device("cuda", rank) if source == "device" else torch.device("cpu")
        self._data = {
            t.name: torch.empty(t.shape, dtype=torch.bfloat16, device=device) for t in self._tensors
        }
        self._failed: BaseException | None = None
        self._consumer.recv()

    def prepare(self, version: int) -> None:
        """Write `version` to the server and poison the consumer."""
        wholes = (Box.whole(tensor.shape) for tensor in self._tensors)
        fill(zip(self._tensors, wholes, self._data.values(), strict=True), version)
        torch.cuda.synchronize()
        self._ask("poison")

    def wrong(self, version: int) -> int:
        """Count the consumer's elements that differ from `version`."""
        return int(self._ask("wrong", version))

    def phases(self) -> dict[str, Callable[[], object]]:
        """Return the phases of an update, in order."""
        return {"register": self._register, "gather": self._gather, "update": self._update}

    def end_update(self) -> None:
        """Free the pool for the next version."""
        self._server.unregister_checkpoint(_NAME)

    def close(self) -> None:
        """End the consumer."""
        self._consumer.send(None)
        self.process.join(30)

    def _register(self) -> None:
        self._server.register_checkpoint(_NAME, named_tensors=self._data, use_shared_memory_pool=True)

    def _gather(self) -> None:
        self._server.gather_metas(_NAME)

    def _update(self) -> None:
        """Send everything to every consumer. Returns when this rank's consumer has loaded."""
        self._failed = None
        self._server.update(_NAME, self._tell_consumer)
        if self._failed is not None:
            raise self._failed

    def _tell_consumer(self, paths: list[tuple[str, str]]) -> None:
        """Make the consumer load. Stores errors, since the server's thread would ignore them."""
        try:
            self._ask("load", dict(paths)[self._server._device_uuid])
        except Exception as error:  # noqa: BLE001
            self._failed = error

    def _ask(self, name: str, *args: object) -> Any:  # noqa: ANN401 (whatever the consumer answers)
        self._consumer.send((name, args))
        return self._consumer.recv()


def main() -> None:
    """Find the best bucket size, then time rounds and print a row."""
    spec = asked()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    model = model_of("llama", spec["gib"])
    stage("checkpoint-engine: memory and processes")
    server = Rank(model, spec["source"], rank, num_ranks)
    control = Control()

    def update() -> dict[str, float]:
        seconds = {name: control.seconds(run) for name, run in server.phases().items()}
        server.end_update()
        return seconds

    _spare_the_collector()
    sizes = {}
    server.prepare(new_version())
    for size in (_SIZES_GB[0], *_SIZES_GB):  # the first one is a warm-up
        stage(f"checkpoint-engine: buckets of {size:g} GB")
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(size)
        sizes[size] = min(update()["update"] for _ in range(2))
    best = min(sizes, key=lambda size: sizes[size])
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(best)
    rounds = []
    for number in range(-NUM_WARM, spec["rounds"]):
        version = new_version()
        stage(f"checkpoint-engine: round {number + 1}")
        server.prepare(version)
        taken = update()
        check(control.total(server.wrong(version)), "checkpoint-engine", version)
        rounds += [taken] if number >= 0 else []
    server.close()
    if rank == 0:
        emit(_row(model, best, sizes, rounds))


def _spare_the_collector() -> None:
    """Freeze this benchmark's imports, so that checkpoint-engine's garbage collections skip them."""
    gc.collect()
    gc.freeze()


def _row(
    model: Model, best: float, sizes: dict[float, float], rounds: list[dict[str, float]]
) -> dict[str, object]:
    row = spread("total", [sum(phases.values()) for phases in rounds])
    for name in _PHASES:
        row |= spread(name, [taken[name] for taken in rounds])
    row |= {"bucket": f"{best:g} GB", "GB": sum(tensor.nbytes for tensor in model) / 1e9}
    return row | {"sweep s": {str(size): seconds for size, seconds in sizes.items()}}


if __name__ == "__main__":
    main()
