"""Deltas by the programs of verl and slime, for `bench_deltas`, where they can be imported.

Both run on a CPU, in one thread. Their own classes compare, encode, decode and apply. Left out are NCCL, by
which verl sends, and Megatron, from which slime gets tensors. Into a folder of PYTHONPATH:

    pip install --target FOLDER --no-deps verl==0.9.1 tensordict==0.10.0 cupy-cuda13x cuda-pathfinder \\
        zstandard xxhash hydra-core omegaconf antlr4-python3-runtime==4.9.3 codetiming dill orjson pyvers \\
        uvicorn httpx httpcore h11 datasets multiprocess pandas pyarrow CLONE_OF_SLIME

slime's receiver is the new file ``sglang/srt/weight_sync/local_checkpoint.py`` of its
``docker/patch/latest/sglang-pull_weights.patch``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Peer", "Weights", "peers"]

Weights = Mapping[str, torch.Tensor]
Named = tuple[str, torch.Tensor]


class Peer(Protocol):
    """A sender and a receiver, which both have the version before."""

    def encode(self, new: Weights) -> int:
        """Compare with the version before, and make the delta. Returns its bytes."""

    def decode(self) -> None:
        """Apply the delta to the receiver's weights."""

    def received(self) -> Weights:
        """Return the receiver's weights."""

    def close(self) -> None:
        """Remove files."""


def peers() -> Mapping[str, Callable[[Weights], Peer]]:
    """Return what makes each peer that is installed, from the first version."""
    found: dict[str, Callable[[Weights], Peer]] = {}
    if importlib.util.find_spec("verl"):
        found["verl"] = Verl
    if importlib.util.find_spec("slime"):
        found |= {f"slime, {each}": partial(Slime, each) for each in ("xor", "overwrite")}
    return found


class Verl:
    """``DeltaShardedCheckpointEngine.send_weights``, and the loader that verl gives to SGLang."""

    def __init__(self, first: Weights) -> None:
        from verl.checkpoint_engine.delta_checkpoint_engine import DeltaShardedCheckpointEngine
        from verl.workers.engine.utils import prime_delta_snapshots

        class Sender(DeltaShardedCheckpointEngine):  # type: ignore[misc]  # verl is not followed
            def _publish_flush(self, flush: Any, first: bool, is_last: bool) -> None:  # noqa: ANN401
                flushes.append(flush)

            def _release_staging_pool(self, phase: str) -> None:
                """Release nothing: cupy is not used."""

        flushes: list[Any] = []
        self._flushes, self._snapshots = flushes, dict[str, torch.Tensor]()
        self._sender = Sender(bucket_size=256 << 20, is_master=True)
        self._sender.rank, self._sender._shard_seeded = 0, True
        prime_delta_snapshots(_shards(first), self._snapshots, pin=False)
        self._live = {name: tensor.clone() for name, tensor in first.items()}

    def encode(self, new: Weights) -> int:
        self._flushes.clear()
        self._new = new
        asyncio.run(self._sender.send_weights(self))
        return sum(flush.wire_bytes + len(_spec(flush)) for flush in self._flushes)

    def get_per_tensor_param_delta_shard(self) -> tuple[Iterator[Any], None]:
        """Answer the sender as verl's engines do."""
        from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export

        return hf_delta_export(_shards(self._new), self._snapshots, _hf_entry_identity), None

    def decode(self) -> None:
        from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

        for flush in self._flushes:
            spec = torch.frombuffer(bytearray(_spec(flush)), dtype=torch.uint8)
            payload = {"__delta_spec__": spec, "__positions__": flush.positions_cpu}
            apply_delta(self, [*payload.items(), ("__values__", flush.values_gpu)])

    def load_weights(self, named: Iterable[Named]) -> None:
        """Copy tensors, as an engine's loader does at last."""
        for name, tensor in named:
            self._live[name].copy_(tensor)

    def received(self) -> Weights:
        return self._live

    def close(self) -> None:
        """Close nothing: there are no files."""


def _shards(weights: Weights) -> Iterator[tuple[str, torch.Tensor, Any]]:
    from verl.workers.engine.spec import ShardSpec

    return ((name, tensor.reshape(-1), ShardSpec.from_param(tensor)) for name, tensor in weights.items())


def _spec(flush: Any) -> bytes:  # noqa: ANN401 (verl's DeltaFlush)
    spec = {"encoding": flush.encoding, "params": [vars(each) for each in flush.params]}
    return json.dumps({**spec, "checksum": flush.checksum}).encode()


class Slime:
    """slime's ``UpdateWeightFromDiskDelta``, and ``pull`` of its patch for SGLang, in a folder in memory."""

    def __init__(self, encoding: str, first: Weights) -> None:
        from safetensors.torch import save_file
        from sglang.srt.weight_sync import local_checkpoint
        from slime.backends.megatron_utils.update_weight import update_weight_from_disk_delta as publishing
        from slime.utils.distributed_utils import init_gloo_group

        self._folder = Path(tempfile.mkdtemp(prefix="weightsync-bench-", dir="/dev/shm"))
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{self._folder}/meeting", rank=0, world_size=1
            )
        init_gloo_group()
        publishing.NUM_WORKERS = local_checkpoint.NUM_WORKERS = 1
        self._base, self._live, self._store = (self._folder / name for name in ("base", "live", "store"))
        self._base.mkdir()
        save_file(dict(first), self._base / "model.safetensors")
        self._pull = local_checkpoint.pull
        self._pull(str(self._live), str(self._base), str(self._store), 0)
        self._publisher = publishing.UpdateWeightFromDiskDelta(
            argparse.Namespace(
                update_weight_disk_dir=str(self._store),
                update_weight_delta_encoding=encoding,
                update_weight_delta_checksum="xxh3-128",
                custom_update_weight_post_write_path=None,
            ),
            [],
            dict,
            model_name="",
            quantization_config=None,
        )
        self._publisher._is_pp_src_rank = True
        self._publisher._iter_hf_tensors = lambda: self._new.items()
        self._publisher._snapshot = {name: _bytes(tensor).numpy() for name, tensor in first.items()}

    def encode(self, new: Weights) -> int:
        self._new = new
        self._publisher.weight_version += 1
        self._publisher._publish()
        nbytes: int = self._publisher.wire_bytes
        return nbytes

    def decode(self) -> None:
        self._pull(str(self._live), str(self._base), str(self._store), self._publisher.weight_version)

    def received(self) -> Weights:
        from safetensors.torch import load_file

        shutil.rmtree(self._publisher._version_dir)
        weights: Weights = load_file(self._live / "model.safetensors")
        return weights

    def close(self) -> None:
        shutil.rmtree(self._folder)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()
