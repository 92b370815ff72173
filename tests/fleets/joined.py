"""A trainer rank that Ray did not start: python -m tests.fleets.joined WIDTH. Says what came of each update.

Rank 0 or 1 has the first or second layer alone. If ``FSDP2`` is set, ranks share the whole model, and if
``ADAPTER`` is, each has the adapter of an `AdapterTrainer`. If ``STOPS`` is, it hangs after the first update.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import distributed, nn

import weightsync
from tests.fleets.actors import build
from tests.fleets.local_cluster import forking_python
from tests.fleets.slots import AdapterTrainer
from weightsync.errors import WeightSyncError

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=1"),
)


class JoinedProcess:
    """A process that says what came of each update. `runs`: see `ServedProcess`."""

    def __init__(self, width: int, env: Mapping[str, str], runs: Sequence[str] = ()) -> None:
        command = [*(runs or [forking_python()]), "-m", "tests.fleets.joined", str(width)]
        at = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=at)

    def said(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()


def trained(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the whole model's weights in update `seed` of a process."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(tensor) for name, tensor in build(width).state_dict().items()}


def main(width: int) -> None:
    rank = os.environ["RANK"]
    model, share = nn.ModuleDict({rank: build(width)[int(rank)]}), itself
    if "FSDP2" in os.environ:
        model, share = sharded(build(width))
    if adapts := "ADAPTER" in os.environ:
        trainer = AdapterTrainer("")
        model = trainer.model
    shard = weightsync.join(model)
    for seed in itertools.count(1):
        if adapts:
            trainer.train(seed)
        else:
            wanted = trained(width, seed)
            for name, tensor in model.state_dict().items():
                tensor.copy_(share(wanted[name], tensor))
        try:
            said = str(shard.update())
        except WeightSyncError as error:
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()
        if "STOPS" in os.environ:  # it answers nobody from now on, and keeps its connections
            os.kill(os.getpid(), signal.SIGSTOP)


def itself(wanted: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return wanted


def sharded(model: nn.Module) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Return FSDP2's model of all ranks, and what makes tensors of such a model's kind."""
    from torch.distributed.fsdp import fully_shard  # takes long
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo")
    return fully_shard(model), lambda wanted, own: distribute_tensor(wanted, own.device_mesh, own.placements)


if __name__ == "__main__":
    main(int(sys.argv[1]))
