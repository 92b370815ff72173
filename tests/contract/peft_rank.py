"""A trainer rank that Ray did not start, with PEFT's adapter: python -m tests.contract.peft_rank MODEL SEED.

The base has the weights that `TransformersTrainer` draws by the seed. Before each update, prints the tokens
of PEFT's own forward pass.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import weightsync
from tests.contract.trl_run import PROMPTS
from tests.fleets.foreign_actors import TransformersTrainer

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RANK = 4


class PeftRank:
    """Such a process."""

    def __init__(self, model: Path, seed: int, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.contract.peft_rank", str(model), str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    def said(self) -> list[list[int]]:
        """Return the tokens of the adapter that the next update takes."""
        assert self._process.stdout
        found: list[list[int]] = json.loads(self._process.stdout.readline())
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@torch.no_grad()
def main(path: str, seed: int) -> None:
    from peft import LoraConfig, get_peft_model  # GPUs' environments have no PEFT, and import this module

    trainer = TransformersTrainer(path)
    trainer.says(seed)
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=TARGETS)
    model = get_peft_model(trainer.actor.model, config)
    shard = weightsync.join(model)
    for version in itertools.count(1):
        torch.manual_seed(version)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3)
        asked = ((torch.tensor([prompt]), len(prompt)) for prompt in PROMPTS)
        made = [model.generate(each, max_new_tokens=16, do_sample=False)[0, n:].tolist() for each, n in asked]
        sys.stdout.write(json.dumps(made) + "\n")
        sys.stdout.flush()
        shard.update()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
