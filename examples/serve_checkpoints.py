"""Fills two engines from checkpoints, without a trainer, and switches between the checkpoints.

python examples/serve_checkpoints.py                 # two small checkpoints, made here
python examples/serve_checkpoints.py FOLDER FOLDER   # your own: one architecture, any weights
"""

import sys
import tempfile
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from weightsync import EngineActor, WeightSync

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=32, dtype="float32", **SHAPE)


def make_checkpoints(root: str) -> list[Path]:
    """Save two models of one architecture, each with random weights of its own."""
    folders = [Path(root, name) for name in ("base", "tuned")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folders


def main(folders: list[Path]) -> None:
    model = str(folders[0])  # the engines read its config; its weights come through WeightSync
    engines = {name: ray.remote(EngineActor).remote("torch", model, name) for name in ("e0", "e1")}
    with WeightSync() as sync:
        sync.register_engines(engines)
        readings = {folder.name: sync.register_checkpoint(folder.name, [str(folder)]) for folder in folders}
        sync.connect()  # waits for the engines and for the first checkpoint
        for name, reading in readings.items():
            print(f"{name}: {reading.result().nbytes} bytes read in {reading.result().seconds:.2f} s")
        for name in [*readings, *readings]:
            print(sync.update_weights(checkpoint=name))
            for each, engine in engines.items():
                rollout = ray.get(engine.generate.remote([[1, 2, 3]], {"max_tokens": 5, "temperature": 0.0}))
                print(f"  {each} serves {name}: 1, 2, 3 -> {rollout.tokens[0]}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as made:
        main([Path(folder).resolve() for folder in sys.argv[1:]] or make_checkpoints(made))
