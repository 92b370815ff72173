"""An engine of vLLM's own model and load balancer on two CPU processes, which cannot answer.

vLLM serves no experts of several ranks on CPUs. But the model, its loader, the balancer's maps and its
copies between ranks run there, with gloo. A CPU has no streams to wait for, and no clock for them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.vllm_experts import wrong_slots
from weightsync.actors.engine import EngineActor
from weightsync.engines.rank.rank import Rank
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.engines.serving.engine_ranks import EngineRanks, answers_of
from weightsync.engines.vllm.api import set_environment
from weightsync.errors import RankLostError, StateError

NUM_RANKS, NUM_REDUNDANT = 2, 2
CPU = torch.device("cpu")


class BalancedVllm(EngineRanks):
    """Holds live weights of a vLLM in two processes. It has no requests."""

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name)
        os.environ["VLLM_DIST_IDENT"] = uuid.uuid4().hex
        set_environment()
        self._num_ranks, self._version = NUM_RANKS, 0
        self._meeting = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            here, there = context.Pipe()
            arguments = there, rank, f"{self._meeting.name}/meeting", model_path, dict(options), os.getpid()
            process = context.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.on_ranks("is_ready")

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            self._require(rank)
            pipe.send((method, args))
        answers: dict[int, Any] = {}
        while len(answers) < NUM_RANKS:
            for pipe in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]):
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise self._lost(rank) from None
        self.check()  # a rank whose peer has died answers with gloo's error
        return answers_of(answers[rank] for rank in range(NUM_RANKS))

    def check(self) -> None:
        for rank in range(NUM_RANKS):
            self._require(rank)

    def _require(self, rank: int) -> None:
        if not self._processes[rank].is_alive():
            raise self._lost(rank)

    def _lost(self, rank: int) -> RankLostError:
        for process in self._processes:
            process.kill()
        return RankLostError(self._name, "watch", f"its process {self._processes[rank].pid} ended", rank)

    def pause(self, mode: str, timeout_s: float) -> None:
        self._version = 0
        self.on_ranks("settle")

    def resume(self, version: int) -> None:
        self.require_whole()
        self._version = version

    def serving(self) -> int:
        return self._version

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._meeting.cleanup()

    def _sleep_option(self, level: int) -> tuple[str, bool]:
        return "options.enable_sleep_mode", False

    def _release(self, level: int) -> None:
        raise StateError("it cannot sleep")

    def _allocate(self, part: str) -> None:
        raise StateError("it cannot sleep")


class BalancedActor(EngineActor):
    """Its actor, which also answers questions about the ranks."""

    def __init__(self, path: str, name: str, slot: str) -> None:
        super().__init__(f"{__name__}:BalancedVllm", path, name, {}, slot)

    async def ask(self, method: str, *args: object) -> list[Any]:
        return await asyncio.to_thread(self._engine.on_ranks, method, *args)


class _Process:
    """One rank: vLLM's model and balancer, and the `Rank` that weightsync has in vLLM's worker."""

    def __init__(self, rank: int, meeting: str, path: str, options: Mapping[str, Any]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model

        from weightsync.engines.vllm.worker import VllmHost

        class InPlace(VllmHost):
            """Nobody has packed the weights of this model, as vLLM's kernels for CPUs want them."""

            def stored_otherwise(self) -> str:
                return ""

        config = EngineArgs(
            model=path,
            tensor_parallel_size=NUM_RANKS,
            enable_expert_parallel=True,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            dtype="bfloat16",
            distributed_executor_backend="mp",
        ).create_engine_config()
        parallel = config.parallel_config
        parallel.rank, parallel.enable_eplb = rank, True  # its check asks for a GPU
        parallel.eplb_config.num_redundant_experts = NUM_REDUNDANT
        parallel.eplb_config.use_async = bool(options.get("use_async"))
        parallel.eplb_config.communicator = "torch_gloo"
        with set_current_vllm_config(config):
            init_distributed_environment(NUM_RANKS, rank, f"file://{meeting}", rank, "gloo")
            initialize_model_parallel(NUM_RANKS, backend="gloo")
            torch.set_default_dtype(torch.bfloat16)
            self.model = initialize_model(vllm_config=config)
        self.state = EplbState(parallel, CPU)
        self.state.add_model(self.model, config.model_config)
        runner = SimpleNamespace(
            eplb_state=self.state,
            vllm_config=config,
            model_config=config.model_config,
            get_model=lambda: self.model,
            get_draft_model=lambda: None,
        )
        self._config = config
        self.rank = Rank("vllm", rank, CPU, InPlace(runner, CPU))  # type: ignore[arg-type]

    def is_ready(self) -> None:
        """Answer once it is."""

    def balance(self, loads: Sequence[int]) -> None:
        """Have vLLM's own policy move experts, as after steps in which experts had these loads."""
        (state,) = self.state.model_states.values()
        state.expert_load_window[0] = torch.tensor(loads)[state.physical_to_logical_map]
        self.state.rearrange()

    def wrong(self, checkpoint: str) -> list[str]:
        """Name each slot of this rank that does not have its expert's bytes."""
        (state,) = self.state.model_states.values()
        return wrong_slots(self.model, state.physical_to_logical_map.tolist(), checkpoint)

    def flip(self, layer: int, slot: int) -> None:
        """Flip a bit in a slot of this rank."""
        (state,) = self.state.model_states.values()
        state.model.expert_weights[layer][1][slot].view(torch.uint8)[3] ^= 1

    def answer(self, method: str, args: Sequence[Any]) -> object:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            if hasattr(self, method):
                return getattr(self, method)(*args)
            return self.rank.answer(method, args)


def _serve(
    pipe: Connection, rank: int, meeting: str, path: str, options: Mapping[str, Any], engine_pid: int
) -> None:
    torch.set_num_threads(1)
    RankProcess.join(rank, engine_pid)
    with mock.patch.object(torch, "Event"), mock.patch.object(torch.accelerator, "current_stream"):
        process = _Process(rank, meeting, path, options)
        while True:
            method, args = pipe.recv()
            pipe.send(process.answer(method, args))
