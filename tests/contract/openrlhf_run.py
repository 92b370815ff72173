"""OpenRLHF's train_ppo_ray on a CPU; run by test_openrlhf.py in an environment with OpenRLHF.

    python -m tests.contract.openrlhf_run FOLDER [FLAG …]

`flash_attn` of ``openrlhf_on_cpu`` has to be on the path.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "DS_ACCELERATOR": "cpu",
    "LOCAL_SIZE": "1",  # else DeepSpeed's accelerator counts NUMA nodes
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPTS = [[5, 6, 7], [200, 3, 90, 41], [11] * 6]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
STEPS, BATCH = 4, 4
FLAGS = f"""
--actor.num_gpus_per_node 2 --ds.zero_stage 3 --ds.attn_implementation eager
--vllm.num_engines 1 --vllm.enforce_eager
--data.input_key input --data.label_key label --data.max_len 48 --rollout.max_new_tokens 8
--rollout.batch_size {BATCH} --rollout.n_samples_per_prompt 1 --rollout.micro_batch_size 2
--train.batch_size {BATCH} --train.micro_batch_size 2 --train.num_episodes 1
--algo.kl.init_coef 0 --algo.advantage.estimator reinforce --actor.adam.lr 0.01 --actor.lr_scheduler constant
--ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds
"""
"""Of train_ppo_ray, for two ranks of ZeRO-3 and one engine, without critic and reference model."""


def train(folder: Path, flags: list[str]) -> None:
    """Run the page's script."""
    import ray

    from tests.models import build_tiny_qwen3, save_tokenizer
    from tests.pages import run_block

    build_tiny_qwen3(folder / "model")
    save_tokenizer(folder / "model", [0])
    prompts = [{"input": f"t{n} t{n + 1}", "label": ""} for n in range(STEPS * BATCH)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    agent = Path(__file__).with_name("openrlhf_agent.py")
    files = f"""
    --actor.model_name_or_path {folder}/model --data.prompt_dataset {folder}/prompts.jsonl
    --train.agent_func_path {agent} --ckpt.path {folder}/steps --ckpt.output_dir {folder}/trained
    """
    sys.argv = ["train.py", *FLAGS.split(), *files.split(), *flags]
    os.environ["OPENRLHF_SAID"] = str(folder / "said")
    ray.init(num_cpus=8, num_gpus=3, include_dashboard=False)
    run_block("docs/openrlhf.md", 0)
    ray.shutdown()


def merged(base: Path, step: Path) -> Path:
    """Return a folder with the whole model of a step. PEFT merges an adapter if OpenRLHF saved only that."""
    if not (step / "adapter_config.json").exists():
        return step
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.models import save_tokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    whole = PeftModel.from_pretrained(model, step).merge_and_unload().bfloat16()
    whole.save_pretrained(step / "merged")
    save_tokenizer(step / "merged", [0])
    return step / "merged"


def greedy(model: Path) -> list[list[int]]:
    """Return the tokens of a vLLM that loads the folder."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="bfloat16", max_model_len=48, enforce_eager=True)
    made = [llm.generate({"prompt_token_ids": each}, SamplingParams(**GREEDY))[0] for each in PROMPTS]
    llm.llm_engine.engine_core.shutdown()
    return [list(each.outputs[0].token_ids) for each in made]


def refuse() -> None:
    """What cannot work is refused by name. Weights that sleep wake before an update."""
    import openrlhf.cli.train_ppo_ray  # noqa: F401 - it now knows the classes
    from openrlhf.trainer.ray import vllm_engine

    from weightsync.errors import ConfigError, StateError
    from weightsync.plugins.openrlhf import Synced, install

    with pytest.raises(StateError, match=r"train_ppo_ray was imported already: call install\(\) before"):
        install()
    for size, bits, named in ((2, False, "ds.tensor_parallel_size: 2"), (1, True, "ds.load_in_4bit: True")):
        ds = SimpleNamespace(tensor_parallel_size=size, load_in_4bit=bits)
        with pytest.raises(ConfigError, match=named):
            Synced(SimpleNamespace(args=SimpleNamespace(ds=ds)))
    calls: list[object] = []
    trainer = object.__new__(Synced)
    trainer.args, trainer.vllm_engines = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=True)), []
    trainer.weight_sync = SimpleNamespace(update_weights=lambda: calls.append("update"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            vllm_engine, "batch_vllm_engine_call", lambda _, method, tags: calls.append((method, tags))
        )
        trainer.broadcast_to_vllm()
    assert calls == [("wake_up", ["weights"]), "update"]


def main(folder: Path, flags: list[str]) -> None:
    train(folder, flags)
    refuse()
    compare(folder, flags)


def compare(folder: Path, flags: list[str]) -> None:
    """Each time, the engine said the tokens of OpenRLHF's own checkpoint, with the adapter merged."""
    said = [json.loads(line) for line in (folder / "said").read_text().splitlines()]
    base = folder / "model"
    steps = [base, *(merged(base, folder / "steps" / f"global_step{n}_hf") for n in range(1, STEPS))]
    wanted = [greedy(step) for step in steps]
    assert all(old != new for old, new in pairwise(wanted)), "a step changed no token"
    if "--train.async_enable" in flags:  # a rollout begins while the step before it trains
        assert len(said) > 2
        wanted = [each for each in wanted if each in said]
    assert said == wanted


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
