"""Real engines, updated in their own ways or ours."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks import rank_probe
from benchmarks.models import Tensor
from benchmarks.peer_vllm import VllmUnderTest
from weightsync.actors.engine import EngineActor

if TYPE_CHECKING:  # so that mypy checks the benchmark's use of adapters
    from weightsync.engines.sglang.adapter import SglangEngine
    from weightsync.engines.sglang.api import SglangServer

__all__ = ["ENGINES", "SglangLatency", "TorchLatency", "VllmLatency"]


Args = Sequence[Sequence[Any]]
"""Arguments per rank; empty for a command without arguments."""


class SglangLatency(EngineActor):
    """Our engine actor, and SGLang's own ``update_weights_from_tensor`` on the same engine."""

    def __init__(self, model_path: str, model: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        super().__init__(
            "sglang", model_path, "sglang", {**options, "custom_weight_loader": [rank_probe.LOADER]}
        )
        self._num_ranks = int(options["tensor_parallel_size"])
        self._answers = tempfile.TemporaryDirectory(prefix="weightsync-bench-")

    async def update_from_tensors(self, payloads: Sequence[bytes], load_format: str | None) -> None:
        """Make one SGLang call with each rank's payload: a probe's, or SGLang's own in a session."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=list(payloads), load_format=load_format, flush_cache=False
        )

        async def send(server: SglangServer) -> None:
            is_probe = load_format == rank_probe.LOADER
            await server.select("draft" if is_probe else "all")
            ok, message = await server.manager.update_weights_from_tensor(request, None)
            if not is_probe:
                await server.select("")  # an update's time includes the end of the session
            if not ok:
                raise RuntimeError(message)

        await self._call(send)

    async def empty(self) -> None:
        """Make the same call to all ranks, which do nothing."""
        await self.update_from_tensors(self._payloads("nothing", (), answers=False), rank_probe.LOADER)

    async def forget(self) -> None:
        """Drop the prefix cache. Raises RuntimeError if SGLang does not."""
        if not await self._call(lambda server: server.forget()):
            raise RuntimeError("SGLang did not flush its cache")

    async def probe(self, command: str, args: Args = ()) -> list[Any]:
        """Return the answer of each rank, see `rank_probe`."""
        await self.update_from_tensors(self._payloads(command, args, answers=True), rank_probe.LOADER)
        return [pickle.loads(self._answer(rank).read_bytes()) for rank in range(self._num_ranks)]

    def _payloads(self, command: str, args: Args, *, answers: bool) -> list[bytes]:
        from sglang.srt.utils import MultiprocessingSerializer

        payloads = []
        for rank in range(self._num_ranks):
            file = str(self._answer(rank)) if answers else ""
            call = pickle.dumps((file, command, _of_rank(args, rank)))
            payloads.append(MultiprocessingSerializer.serialize([(call, torch.empty(0, dtype=torch.uint8))]))
        return payloads

    def _answer(self, rank: int) -> Path:
        return Path(self._answers.name) / str(rank)

    async def _call(self, work: Callable[[SglangServer], Any]) -> Any:  # noqa: ANN401 (whatever SGLang returns)
        engine = cast("SglangEngine", self._engine)  # behind our adapter, which only a benchmark may access
        return await asyncio.to_thread(engine.loop.call, work)


class VllmLatency(VllmUnderTest):
    """Our engine actor with vLLM's own weight transfer over CUDA IPC."""

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Tell vLLM how weights will arrive."""
        await self._rpc("init_weight_transfer_engine", init_info=init_info)

    async def start_weight_update(self) -> None:
        """Begin vLLM's own update."""
        await self._rpc("start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Take a chunk."""
        await self._rpc("update_weights", update_info=update_info)

    async def finish_weight_update(self) -> None:
        """End vLLM's own update."""
        await self._rpc("finish_weight_update")

    async def empty(self) -> None:
        """Make a call to all ranks, which do nothing."""
        await self.probe("nothing")

    async def _rpc(self, method: str, **arguments: Mapping[str, Any]) -> None:
        await self._call(lambda engine: engine.collective_rpc(method, kwargs=arguments))

    async def forget(self) -> None:
        """Drop the prefix cache."""
        await self._call(lambda engine: engine.reset_prefix_cache(reset_running_requests=True))

    async def probe(self, command: str, args: Args = ()) -> list[Any]:
        """Return the answer of each rank, see `rank_probe`."""
        return await self._on_worker(partial(_on_worker, command=command, args=args))


class TorchLatency(EngineActor):
    """Our engine actor around transformers' model, which has no own way of updates."""

    def __init__(self, model_path: str, model: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        super().__init__("torch", model_path, "torch", options)

    async def empty(self) -> None:
        """Make a call with nothing to do."""

    async def probe(self, command: str, args: Args = ()) -> list[Any]:
        """Return the answer of the only rank, see `rank_probe`."""
        engine: Any = self._engine
        with torch.no_grad():
            return [rank_probe.answer(engine.model, command, _of_rank(args, 0))]


def _on_worker(worker: Any, command: str, args: Args) -> Any:  # noqa: ANN401 (vLLM's Worker)
    return rank_probe.on_worker(worker, command, _of_rank(args, worker.rank))


def _of_rank(args: Args, rank: int) -> Sequence[Any]:
    return args[rank] if args else ()


ENGINES = {"sglang": SglangLatency, "vllm": VllmLatency, "torch": TorchLatency}
