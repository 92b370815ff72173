"""Trains a plain torch module and serves each new version from two engines, all on a CPU.

python examples/plain_module_cpu.py
"""

import tempfile

import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from weightsync import EngineActor, SyncConfig, TrainerShard, WeightSync

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=32, dtype="float32", **SHAPE)


class Trainer(TrainerShard):  # teaches the model to count; weightsync reads its self.model
    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train(self, num_steps: int) -> float:
        numbers = torch.arange(16)[None]
        for _ in range(num_steps):
            loss = self.model(numbers, labels=numbers).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)


def main(path: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    trainer = ray.remote(Trainer).remote(path)
    engines = {name: ray.remote(EngineActor).remote("torch", path, name) for name in ("e0", "e1")}
    with WeightSync(SyncConfig(timeout_s=60)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        for version in range(1, 6):
            print(f"loss {ray.get(trainer.train.remote(num_steps=8)):.2f}")
            print(sync.update_weights(version))
            for name, engine in engines.items():
                rollout = ray.get(engine.generate.remote([[1, 2, 3]], {"max_tokens": 5, "temperature": 0.0}))
                print(f"  {name} serves version {rollout.version}: 1, 2, 3 -> {rollout.tokens[0]}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
