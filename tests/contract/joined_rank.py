"""A trainer rank that Ray did not start: python -m tests.contract.joined_rank MODEL base | adapter SEED.

Before each update, the rank draws new weights, or a new PEFT adapter on weights that `TransformersTrainer`
draws by the seed. It prints the tokens of the model's own forward pass.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import weightsync
from tests.contract.trl_run import PROMPTS
from tests.fleets.foreign_actors import SureTrainer, TransformersTrainer

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RANK = 4
ON_GPU = torch.cuda.is_available()


class JoinedRank:
    """Such a process."""

    def __init__(self, model: Path, what: str, seed: int, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.contract.joined_rank", str(model), what, str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    def said(self) -> list[list[int]]:
        """Return the tokens of the weights that the next update takes."""
        assert self._process.stdout
        found: list[list[int]] = json.loads(self._process.stdout.readline())
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def add_adapter(model: Any) -> Any:
    """Return PEFT's model, with an adapter."""
    from peft import LoraConfig, get_peft_model  # not all GPUs' environments have PEFT

    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=TARGETS))


def complete(model: Any, version: int) -> list[list[int]]:
    """Draw another adapter, then complete the prompts greedily."""
    torch.manual_seed(version)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.normal_(0, 0.3)
    asked = ((torch.tensor([prompt], device=model.device), len(prompt)) for prompt in PROMPTS)
    return [model.generate(each, max_new_tokens=16, do_sample=False)[0, n:].tolist() for each, n in asked]


@torch.no_grad()
def main(path: str, what: str, seed: int) -> None:
    trainer = SureTrainer(path, "cuda") if ON_GPU else TransformersTrainer(path)
    trainer.says(seed)
    model = trainer.actor.model if what == "base" else add_adapter(trainer.actor.model)
    shard = weightsync.join(model)
    for version in itertools.count(1):
        made = trainer.says(seed + version) if what == "base" else complete(model, version)
        sys.stdout.write(json.dumps(made) + "\n")
        sys.stdout.flush()
        shard.update()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
