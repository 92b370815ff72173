"""verl's own trainers, rollouts and managers, with the settings of docs/verl.md; run by test_verl.py on CPUs.

    python -m tests.contract.verl_run fleet FOLDER      # verl's workers and replicas, and both managers
    python -m tests.contract.verl_run trainer FOLDER    # `separate_async`, as on the page
    python -m tests.contract.verl_run one_step FOLDER   # `one_step_off_policy`

On CPUs, Ray counts GPUs that nobody uses: two for trainers, and one for each rollout. On two GPUs, where
``trainer`` runs too, one is for a trainer, and one for a rollout.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import ray
import torch
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from tests.models import build_tiny_qwen3, greedy, save_tokenizer
from tests.pages import blocks
from tests.patience import patient
from weightsync.errors import ConfigError, EngineError
from weightsync.faults import Fault, FaultPlan
from weightsync.plugins.verl_manager import Manager, model_of

PROMPT = [5, 6, 7]
ON_GPUS = torch.cuda.is_available()
VOCABULARY = 5003 if ON_GPUS else 256
SMALL = """
    actor_rollout_ref.model.path={folder}/model
    +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.actor.ppo_mini_batch_size=2
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.enforce_eager=True
    actor_rollout_ref.rollout.max_model_len=64
    actor_rollout_ref.rollout.max_num_batched_tokens=64
    actor_rollout_ref.rollout.max_num_seqs=4
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
    trainer.device=cpu
"""

TRAIN = """
    data.train_files={folder}/words.parquet
    data.val_files={folder}/words.parquet
    data.train_batch_size=2
    data.max_prompt_length=16
    data.max_response_length=16
    data.dataloader_num_workers=0
    algorithm.adv_estimator=grpo
    reward.custom_reward_function.path={folder}/reward.py
    reward.num_workers=1
    actor_rollout_ref.actor.optim.lr=0.01
    +actor_rollout_ref.actor.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}
    actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.calculate_log_probs=True
    trainer.v1.separate_async.parameter_sync_step=1
    trainer.v1.separate_async.num_warmup_batches=0
    trainer.nnodes=1
    trainer.n_gpus_per_node=2
    trainer.total_training_steps=3
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.default_local_dir={folder}/runs
    trainer.logger=[console]
    ray_kwargs.ray_init.num_cpus=32
    +ray_kwargs.ray_init.num_gpus=3
    +ray_kwargs.ray_init.include_dashboard=False
    +ray_kwargs.ray_init.object_store_memory=268435456
    +ray_kwargs.ray_init._system_config.memory_monitor_refresh_ms=0
"""
_OF_GPUS = {
    "trainer.device=cpu": "trainer.device=cuda actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "rollout.dtype=float32": "rollout.dtype=bfloat16",
    "trainer.n_gpus_per_node=2": "trainer.n_gpus_per_node=1",
    "ray_init.num_gpus=3": "ray_init.num_gpus=2",
}
REWARD = """
def compute_score(solution_str, **_):
    return float(len(set(solution_str.split())))
"""


def settings(folder: Path) -> list[str]:
    """Return the page's settings, and those that make it small."""
    (page,) = blocks("docs/verl.md", "sh")
    words = shlex.split(page.replace("\\\n", ""))
    return words[words.index("verl.trainer.main_ppo") + 1 :] + here(SMALL.format(folder=folder))


def here(given: str) -> list[str]:
    """Return settings for the devices of this host."""
    for on_cpus, on_gpus in _OF_GPUS.items() if ON_GPUS else ():
        given = given.replace(on_cpus, on_gpus)
    return given.split()


class Fleet:
    """Two trainers in actors of verl's, and two replicas."""

    def __init__(self, folder: Path) -> None:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", settings(folder)).actor_rollout_ref
        self.engine = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
        worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=config, role="actor")
        self.trainers = RayWorkerGroup(
            resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1),
            ray_cls_with_init=create_colocated_worker_cls({"actor": worker}),
            device_name="cpu",
        ).spawn({"actor"})["actor"]
        self.trainers.init_model()
        rollout, model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
        kind = get_rollout_replica_class("vllm")
        self.replicas = [kind(rank, rollout, model, gpus_per_node=1) for rank in range(2)]
        self.model = build_tiny_qwen3(folder / "model")
        asyncio.run(self._start())

    async def _start(self) -> None:
        await asyncio.gather(*(each.init_standalone() for each in self.replicas))

    def train(self, seed: int) -> list[int]:
        """Draw other weights. Returns the tokens of a model that has them."""
        trained = [each.__ray_call__.remote(draw, seed) for each in self.trainers.workers]
        self.model.load_state_dict(ray.get(trained)[0])
        return greedy(self.model, [PROMPT])[0]

    def update(
        self, manager: CheckpointEngineManager, step: int, replicas: Sequence[RolloutReplica]
    ) -> dict[str, Any]:
        """Train and update. Each replica has the trainers' tokens then, and says the step."""
        wanted = self.train(step)
        metrics: dict[str, Any] = manager.update_weights(global_steps=step)
        for said in ray.get([ask(each) for each in replicas]):
            assert said.token_ids == wanted, f"not the trainers' tokens after step {step}"
            assert said.extra_fields["global_steps"] == step
        return metrics


@torch.no_grad()
def draw(worker: object, seed: int) -> dict[str, torch.Tensor]:
    """Draw another model's weights in FSDP2's shards, and return them whole."""
    torch.manual_seed(seed)
    model = model_of(worker)
    for shard in model.parameters():
        shard.to_local().normal_(0, 0.3)
    return {name: each.full_tensor() for name, each in model.state_dict().items()}


def ask(replica: RolloutReplica) -> Any:
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    return replica.servers[0].generate.remote(PROMPT, sampling, os.urandom(8).hex())


def by_manager(fleet: Fleet) -> None:
    first, second = fleet.replicas
    manager = Manager(fleet.engine, fleet.trainers, [first, second])
    for step in range(3):
        metrics = fleet.update(manager, step, [first, second])
        assert metrics["weightsync/version"] == step + 1
        assert metrics["weightsync/num_serving"] == 2
    links = {(each.source, each.target): each.nbytes for each in manager.sync.links()}
    assert len(links) == 4, "a replica does not read from both trainers"
    manager.remove_replicas([second])
    fleet.update(manager, 3, [first])
    manager.add_replicas([second])
    fleet.update(manager, 4, [first, second])

    wanted = fleet.train(5)
    manager.sync.inject(FaultPlan(faults=(Fault(process="engine replica 1", action="error", at="verify"),)))
    with pytest.raises(EngineError, match="replica 1"):
        manager.update_weights(global_steps=5)
    parked = [ask(each) for each in fleet.replicas]
    assert ray.wait(parked, timeout=patient(2))[0] == [], "a replica serves after an update that failed"
    manager.update_weights(global_steps=6)
    assert [each.token_ids for each in ray.get(parked)] == [wanted, wanted]

    fleet.train(7)
    manager.sync.remove_engine("replica 1")  # as one that has not come back since it was lost
    with pytest.raises(EngineError, match="replica 1 failed in update: it is not connected"):
        manager.update_weights(global_steps=7)
    parked = [ask(each) for each in fleet.replicas]
    assert ray.wait(parked, timeout=patient(2))[0] == [], "a replica without the version serves"
    manager.sync.close()


def refuse() -> None:
    """What cannot be updated is refused by name, before any request is aborted."""
    replicas = [
        (
            RolloutMode.HYBRID,
            1,
            "rollout_mode: 'hybrid' is not valid; use a trainer whose rollouts have GPUs",
        ),
        (RolloutMode.COLOCATED, 1, "rollout_mode: 'colocated' is not valid"),
        (RolloutMode.STANDALONE, 2, "servers: 2 is not valid; give each replica the GPUs of one host"),
    ]
    for mode, num_hosts, named in replicas:
        manager = object.__new__(Manager)
        manager.replicas = [SimpleNamespace(replica_rank=0, rollout_mode=mode, servers=[None] * num_hosts)]
        with pytest.raises(ConfigError, match=named):
            manager.update_weights(global_steps=1)


class Received:
    """In the place of verl's client of vLLM, which cannot load into weights that vLLM packs for CPUs."""

    def __init__(self) -> None:
        self.last: dict[str, torch.Tensor] = {}

    async def update_weights(
        self, came: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        self.last = {name: each.clone() async for name, each in came}


def on_workers(replicas: Sequence[RolloutReplica], asked: Callable[[Any], Any]) -> list[Any]:
    return ray.get([each.__ray_call__.remote(asked) for replica in replicas for each in replica.workers])


def by_checkpoint_engine(fleet: Fleet) -> None:
    on_workers(fleet.replicas, lambda worker: setattr(worker, "server_adapter", Received()))
    manager = CheckpointEngineManager(fleet.engine, fleet.trainers, [])

    def update(step: int, replicas: Sequence[RolloutReplica]) -> str:
        """Return the name of the communicator that all replicas have."""
        fleet.train(step)
        manager.replicas = list(replicas)
        manager.update_weights(global_steps=step)
        wanted = fleet.model.state_dict()
        for came in on_workers(replicas, lambda worker: worker.server_adapter.last):
            assert came.keys() == wanted.keys()
            assert all(torch.equal(came[name], each) for name, each in wanted.items())
        (epoch,) = {*on_workers(replicas, lambda worker: worker.checkpoint_engine.epoch)}
        return str(epoch)

    both, first = fleet.replicas, fleet.replicas[:1]
    epochs = [update(step, replicas) for step, replicas in enumerate([both, both, first, both])]
    assert epochs[0] == epochs[1], "the communicator was not kept"
    assert len(set(epochs)) == 3, "who left is waited for"


def fleet(folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=128 << 20,
        # A host that gives its guest memory as it is used looks full when it is not.
        _system_config={"memory_monitor_refresh_ms": 0},
    )
    refuse()
    made = Fleet(folder)
    by_manager(made)
    by_checkpoint_engine(made)
    ray.shutdown()


def save_words(folder: Path) -> None:
    """Save prompts, a reward, and a tokenizer that verl takes for Qwen's."""
    end = VOCABULARY - 2
    words = {"\n": end + 1, "<|im_end|>": end, **{f"w{token}": token for token in range(end)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Split(" ", "removed")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="<|im_end|>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": f"w{word} w{word + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for word in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "words.parquet")
    (folder / "reward.py").write_text(REWARD)


def run(folder: Path, program: str, configured: Sequence[str]) -> list[dict[str, str]]:
    """Train for three steps. Returns verl's metrics of each."""
    save_words(folder)
    (page,) = blocks("docs/verl.md", "sh")
    variables = dict(re.findall(r"(VERL_\w+)=(\S+)", page))
    ours = "VERL_USE_EXTERNAL_MODULES"
    variables[ours] = ",".join(filter(None, [os.environ.get(ours), variables[ours]]))
    variables["RAY_ADDRESS"] = "local"  # else verl joins another cluster of this host, if there is one
    process = subprocess.Popen(
        [sys.executable, "-m", program, *configured, *here(TRAIN.format(folder=folder))],
        cwd=folder,  # Hydra writes there
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    steps: list[str] = []
    for line in process.stdout or ():
        sys.stdout.write(line)
        sys.stdout.flush()
        steps += re.findall(r" step:\d+ - .*", line)
    assert process.wait() == 0
    return [dict(re.findall(r"([\w/]+):(\S+)", step)) for step in steps]


def trainer(folder: Path) -> None:
    """The page's command. Without warm-up, rollouts of a step have the weights of the step before."""
    seen = run(folder, "verl.trainer.main_ppo", settings(folder))
    assert [each["weightsync/version"] for each in seen] == ["2", "3", "4"]
    off = [float(each["training/rollout_probs_diff_max"]) for each in seen]
    most = 0.1 if ON_GPUS else 1e-5  # there vLLM computes in bfloat16
    assert max(off) < most, f"the rollouts' probabilities are off by {off}"


def one_step(folder: Path) -> None:
    """The page's settings without the mode, and `checkpoint_manager_class`."""
    without = [each for each in settings(folder) if not each.startswith("trainer.v1.trainer_mode=")]
    manager = "+actor_rollout_ref.rollout.checkpoint_manager_class=weightsync.plugins.verl_manager.Manager"
    found = "hydra.searchpath=[pkg://verl.trainer.config]"  # outside of verl's checkout
    own = [manager, found, "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
    seen = run(folder, "verl.experimental.one_step_off_policy.main_ppo", [*without, *own])
    assert [each["weightsync/version"] for each in seen] == ["2", "3", "4"]


if __name__ == "__main__":
    into = Path(sys.argv[2])
    if ON_GPUS:
        from tests.gpu.qwen3_models import save_qwen3

        save_qwen3(into / "model", "untied", 0)
    else:
        build_tiny_qwen3(into / "model")
    save_tokenizer(into / "model", [0], VOCABULARY)
    {"fleet": fleet, "trainer": trainer, "one_step": one_step}[sys.argv[1]](into)
