"""Trains over two FSDP2 ranks and serves each new version from two vLLM engines.

python examples/fsdp2_two_vllm.py   # takes four GPUs; without a GPU it runs on vLLM's CPU build
"""

import tempfile

import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from weightsync import EngineActor, TrainerShard, WeightSync

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=32, dtype="float32", **SHAPE)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Trainer(TrainerShard):  # one of two ranks that teach the model to count
    def __init__(self, path: str, rank: int, meeting: str) -> None:
        dist.init_process_group(init_method=f"file://{meeting}", rank=rank, world_size=2)
        self.model = AutoModelForCausalLM.from_pretrained(path).to(DEVICE)
        for module in (*self.model.get_submodule("model.layers").children(), self.model):
            fully_shard(module, mesh=dist.device_mesh.init_device_mesh(DEVICE, (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train(self, num_steps: int) -> float:
        numbers = torch.arange(16, device=DEVICE)[None]
        for _ in range(num_steps):
            loss = self.model(numbers, labels=numbers).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)


def main(path: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    place = {"num_cpus": 0, "num_gpus": int(DEVICE == "cuda")}
    engine, trainer = (ray.remote(cls).options(**place) for cls in (EngineActor, Trainer))
    engines = {name: engine.remote("vllm", path, name, {"max_model_len": 64}) for name in ("e0", "e1")}
    with WeightSync() as sync:
        sync.register_trainers([trainer.remote(path, rank, f"{path}/meeting") for rank in range(2)])
        sync.register_engines(engines)
        sync.connect()
        for version in range(1, 6):
            losses = ray.get([each.train.remote(num_steps=8) for each in sync.trainers()])
            print(f"loss {losses[0]:.2f}", sync.update_weights(version), sep="\n")
            for name, handle in engines.items():
                rollout = ray.get(handle.generate.remote([[1, 2, 3]], {"max_tokens": 5, "temperature": 0.0}))
                print(f"  {name} serves version {rollout.version}: 1, 2, 3 -> {rollout.tokens[0]}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
