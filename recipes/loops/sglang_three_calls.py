"""A loop that updates SGLang by SGLang's own three calls, and by weightsync.

On a host with two GPUs and SGLang, ``python -m weightsync.recipes.loops.sglang_three_calls`` starts a small
Llama on one and an engine with dummy weights on the other. The engine is updated by weightsync first;
then the trainer trains on and sends its weights itself: ``init_weights_update_group``,
``update_weights_from_distributed``.
After each update, ``get_weights_by_name`` reads back what the engine holds, tensor by tensor.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from transformers import AutoModelForCausalLM, LlamaConfig

from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.engines.sglang.api import join_update_group

GROUP, ROWS, WAIT_S = "three-calls", 16, 300
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)
ENGINE = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.3}


class Trainer(TrainerShard):
    """One rank with the whole model on a GPU."""

    def __init__(self, path: str) -> None:
        super().__init__()
        config = LlamaConfig.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()

    @torch.no_grad()
    def train(self) -> None:
        """Stand in for a training step."""
        for parameter in self.model.parameters():
            parameter.normal_(std=0.02)

    def metas(self) -> list[tuple[str, str, list[int]]]:
        """Return name, dtype and shape of each tensor, in the order of `send`."""
        return [
            (name, str(each.dtype).removeprefix("torch."), list(each.shape))
            for name, each in self.model.named_parameters()
        ]

    def rows(self, name: str) -> list[Any]:
        """Return the first rows of a tensor, as floats."""
        rows: list[Any] = self.model.get_parameter(name)[:ROWS].float().tolist()
        return rows

    def join(self, port: int) -> None:
        """Open the group with the engine's ranks, as rank 0, and wait for them."""
        self._group = join_update_group("127.0.0.1", port, world_size=2, name=GROUP)

    def send(self) -> None:
        """Broadcast every tensor. The engine must be receiving."""
        for parameter in self.model.parameters():
            torch.distributed.broadcast(parameter.data, src=0, group=self._group)
        torch.cuda.synchronize()


class Engine(EngineActor):
    """weightsync's engine actor, which also forwards SGLang's own calls."""

    async def own(self, call: str, **fields: object) -> Any:  # noqa: ANN401 - SGLang's
        """Make a call that only this adapter has, without blocking the actor."""
        return await asyncio.to_thread(getattr(self._engine, call), **fields)


def main() -> int:
    """Run the loop. Returns 0 if the engine held the trainer's weights each time."""
    with tempfile.TemporaryDirectory() as path:
        CONFIG.save_pretrained(Path(path))
        # Both sides of a group have to agree on SGLang's own setting.
        nccl = {"env_vars": {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}}
        trainer = ray.remote(Trainer).options(num_gpus=1, runtime_env=nccl).remote(path)
        engine = ray.remote(Engine).options(num_gpus=1).remote("sglang", path, "e0", ENGINE)
        with WeightSync(SyncConfig(timeout_s=60)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": engine})
            sync.connect()
            print(sync.update_weights(1))
            differ = _differing(trainer, engine)
        ray.get(trainer.train.remote())
        _three_calls(trainer, engine)
        differ += _differing(trainer, engine)
        ray.get(engine.close.remote(), timeout=WAIT_S)
    print(f"differing tensors: {', '.join(differ) or 'none'}")
    return 1 if differ else 0


def _three_calls(trainer: ActorHandle[Any], engine: ActorHandle[Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    met = engine.own.remote("init_weights_update_group", **group, group_name=GROUP)
    ray.get([met, trainer.join.remote(port)], timeout=WAIT_S)
    names, dtypes, shapes = map(list, zip(*ray.get(trainer.metas.remote()), strict=True))
    begun = time.perf_counter()
    metas = {"names": names, "dtypes": dtypes, "shapes": shapes}
    loaded = engine.own.remote("update_weights_from_distributed", **metas, group_name=GROUP)
    ray.get([loaded, trainer.send.remote()], timeout=WAIT_S)
    print(f"SGLang's own update of {len(names)} tensors: {1000 * (time.perf_counter() - begun):.0f} ms")


def _differing(trainer: ActorHandle[Any], engine: ActorHandle[Any]) -> list[str]:
    names = [name for name, _, _ in ray.get(trainer.metas.remote())]
    sent = ray.get([trainer.rows.remote(name) for name in names])
    asked = [engine.own.remote("get_weights_by_name", name=name, truncate_size=ROWS) for name in names]
    held = ray.get(asked, timeout=WAIT_S)
    return [name for name, one, other in zip(names, sent, held, strict=True) if one != other]


if __name__ == "__main__":
    sys.exit(main())
