"""A trainer that sends weights in the engines' own ways, timing each layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle

from benchmarks.gpu_fleet import Model, ShardTrainer
from benchmarks.models import Tensor
from benchmarks.rank_probe import synchronize
from weightsync.protocol.timing import PhaseClock

__all__ = ["LatencyTrainer"]

Named = tuple[str, torch.Tensor]


class LatencyTrainer(ShardTrainer):
    """One rank.

    All ranks make every call at the same time; the first one calls the engine.

    A way returns the seconds of the layers and the number of calls to the engine.
    """

    def __init__(
        self, model: Model, rank: int, num_ranks: int, meeting: str, source: str, slot: str | None
    ) -> None:
        super().__init__(model, rank, num_ranks, meeting, source, slot)
        on_gpus = torch.cuda.is_available()
        self._group = dist.new_group(backend="nccl" if on_gpus else "gloo") if num_ranks > 1 else None
        if not on_gpus:
            # The other strategy passes descriptors, to children only.
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    def load_code(self, engine: str) -> None:
        """Import the engine's code that this trainer needs, which takes seconds."""
        on_gpus = torch.cuda.is_available()
        if engine == "sglang":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            if on_gpus:
                monkey_patch_torch_reductions()  # devices are sent as UUIDs
        elif engine == "vllm" and on_gpus:
            from vllm.distributed.weight_transfer import ipc_engine  # noqa: F401

    def ping(self, engine: ActorHandle[Any], num_calls: int) -> list[float]:
        """Return the seconds of each of `num_calls` calls that do nothing."""
        seconds = []
        for _ in range(num_calls):
            started = time.perf_counter()
            ray.get(engine.empty.remote())
            seconds.append(time.perf_counter() - started)
        return seconds

    def send_sglang(self, engine: ActorHandle[Any], max_nbytes: int, *, flat: bool) -> Mapping[str, float]:
        """Send by SGLang's ``update_weights_from_tensor``, at most `max_nbytes` or one tensor per call.

        `flat`: copy into one buffer first, which is sent as one handle (``flattened_bucket``).
        """
        clock, num_calls = PhaseClock(), 0
        for tensors in self._chunks(max_nbytes):
            named = [self._gathered(tensor, local, clock) for tensor, local in tensors]
            payload: object = named
            if flat:
                with _synced(clock, "pack"):
                    payload = _flattened(named)
            with _synced(clock, "metadata"):
                payloads = self._to_first(_serialized(payload))
            if payloads:
                with _synced(clock, "engine"):
                    ray.get(engine.update_from_tensors.remote(payloads, "flattened_bucket" if flat else None))
            dist.barrier()  # the other ranks keep their tensors until here
            num_calls += 1
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return {**clock.seconds, "calls": num_calls}

    def open_vllm(self, engine: ActorHandle[Any], max_nbytes: int, *, flat: bool) -> None:
        """Connect to `engine` by vLLM's IPC transfer, `flat` in a buffer of `max_nbytes`."""
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        buffer = max(max_nbytes, *(tensor.nbytes for tensor, _, _ in self.parts))
        info = IPCTrainerInitInfo(rank=dist.get_rank(), packed=flat, packed_buffer_size_bytes=buffer)
        self._client = _TimedClient(engine)
        self._sender = IPCTrainerWeightTransferEngine.trainer_init(
            info, client=self._client, source=self._source()
        )

    def send_vllm(self) -> Mapping[str, float]:
        """Send by vLLM's CUDA IPC, as opened.

        Everything but gathering and the engine's calls counts as metadata, packing included.
        """
        clock = self._client.clock = PhaseClock()
        with _synced(clock, "all"):
            self._sender.send_weights()
        seconds = clock.seconds
        rest = seconds.pop("all") - sum(seconds.values())
        return {**seconds, "metadata": rest, "calls": self._client.num_calls}

    def _source(self) -> Any:  # noqa: ANN401 (vLLM's WeightSource)
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        trainer = self

        class Gathered(WeightSource):  # type: ignore[misc]  # vLLM is not followed
            @cached_property
            def metadata(self) -> list[Any]:
                return [ParamMeta(each.name, torch.bfloat16, each.shape) for each, _, _ in trainer.parts]

            def iter_full(self) -> Iterator[Named]:
                clock = trainer._client.clock
                return (trainer._gathered(tensor, local, clock) for tensor, _, local in trainer.parts)

        return Gathered()

    def _chunks(self, max_nbytes: int) -> Iterator[list[tuple[Tensor, torch.Tensor]]]:
        chunk: list[tuple[Tensor, torch.Tensor]] = []
        for tensor, _, local in self.parts:
            if chunk and sum(each.nbytes for each, _ in chunk) + tensor.nbytes > max_nbytes:
                yield chunk
                chunk = []
            chunk.append((tensor, local))
        yield chunk

    def _gathered(self, tensor: Tensor, local: torch.Tensor, clock: PhaseClock) -> Named:
        """Gather the whole tensor, as engines' loaders cut their ranks' parts themselves."""
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return tensor.name, local
        assert local.shape[0] * num_ranks == tensor.shape[0], f"{tensor.name} has no equal shares"
        with _synced(clock, "gather"):
            whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
            dist.all_gather_into_tensor(whole, local, group=self._group)
        return tensor.name, whole

    def _to_first(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload on the first rank, and nothing on others."""
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(payload, found)
        return found or []


class _TimedClient:
    """The client of vLLM's trainer side. Times each call to the engine."""

    def __init__(self, engine: ActorHandle[Any]) -> None:
        self._engine, self.clock, self.num_calls = engine, PhaseClock(), 0

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        ray.get(self._engine.init_weight_transfer_engine.remote(init_info))

    def start_weight_update(self) -> None:
        self.num_calls = 0
        with _synced(self.clock, "session"):
            ray.get(self._engine.start_weight_update.remote())

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.num_calls += 1
        with _synced(self.clock, "engine"):
            ray.get(self._engine.update_weights.remote(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        with _synced(self.clock, "session"):
            ray.get(self._engine.finish_weight_update.remote())


def _flattened(named: list[Named]) -> dict[str, object]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named)
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def _serialized(payload: object) -> bytes:
    from sglang.srt.utils import MultiprocessingSerializer

    data: bytes = MultiprocessingSerializer.serialize(payload)
    return data


@contextlib.contextmanager
def _synced(clock: PhaseClock, name: str) -> Iterator[None]:
    """Time a phase that begins and ends with an idle device."""
    synchronize()
    with clock.phase(name):
        yield
        synchronize()
