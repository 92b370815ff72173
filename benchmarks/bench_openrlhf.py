"""Times weight updates in OpenRLHF's own `train_ppo_ray`, by OpenRLHF and by weightsync.

    python -m benchmarks.bench_openrlhf --steps 10
    python -m benchmarks.bench_openrlhf --cpu --steps 2     weightsync alone, as a smoke test

On one GPU, which a rank of ZeRO-3 and vLLM share, and where vLLM sleeps while the rank trains
(`--train.colocate_all --vllm.enable_sleep`), so OpenRLHF's own updates are by CUDA IPC. The model has the
shape of Qwen3-0.6B and random weights. The clock is OpenRLHF's own, ``timing/broadcast``. Medians with
minimum and maximum, without the first two updates. Before each batch the rollout engine's greedy tokens are
noted. Afterwards a vLLM that loads OpenRLHF's checkpoint of each step has to say the same.

Needs an environment with OpenRLHF 0.11.2, vLLM and flash-attn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.common import environment, print_table, write_json
from benchmarks.latency_rig import ENGINES_ENV
from benchmarks.models import save_config, shape_of
from benchmarks.updates import NUM_WARM, WrongWeightsError, spread

__all__ = ["BATCH", "GREEDY", "PROMPTS", "SAID", "main"]

BATCH, SAID = 8, "WEIGHTSYNC_BENCH_SAID"
PROMPTS = [[5, 6, 7], [200, 3, 90, 41], [11] * 6]
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
_MAX_LEN = 64
_FLAGS = f"""
--actor.num_gpus_per_node 1 --ds.zero_stage 3 --ds.attn_implementation eager
--vllm.num_engines 1 --vllm.enforce_eager --vllm.gpu_memory_utilization 0.3
--data.input_key input --data.label_key label --data.max_len {_MAX_LEN} --rollout.max_new_tokens 16
--rollout.batch_size {BATCH} --rollout.n_samples_per_prompt 1 --rollout.micro_batch_size {BATCH}
--train.batch_size {BATCH} --train.micro_batch_size {BATCH} --train.num_episodes 1
--algo.kl.init_coef 0 --algo.advantage.estimator reinforce --actor.adam.lr 1e-4 --actor.lr_scheduler constant
--ckpt.save_steps 1 --ckpt.save_hf --ckpt.disable_ds
"""
_WAYS = ("ours", "OpenRLHF")
_COLOCATED = "--train.colocate_all --vllm.enable_sleep"
_PACKAGES = ("openrlhf", "vllm", "deepspeed", "torch", "ray", "transformers")
_BROADCAST = re.compile(r"Global step \d+: .*'timing/broadcast': ([\d.e-]+)")


def main() -> None:
    """Parse arguments, train in each way, compare tokens, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="updates whose tokens are compared")
    parser.add_argument("--only", choices=_WAYS)
    parser.add_argument("--cpu", action="store_true", help="a smoke test, by weightsync alone")
    parser.add_argument("--logs", type=Path, help="a folder for the output of the processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, folder = args.role[0], Path(args.role[1])
        _say(folder) if role == "said" else _train(role, folder, cpu=args.cpu)
        return
    where = environment(_PACKAGES)
    ways = [args.only] if args.only else ["ours"] if args.cpu else _WAYS
    model = "100m" if args.cpu else "0.6b"
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as name:
        folder = Path(name)
        _prepare(folder, model, args.steps + 1)  # a batch notes the tokens of the update before it
        loads = _Process("said", folder, args.logs or folder, cpu=args.cpu)
        found = [_BROADCAST.findall(_Process(way, folder, loads.logs, cpu=args.cpu).end()) for way in ways]
        loads.end("\n".join(ways))
        rows = [
            {"model": model} | _row(way, folder / way, [*map(float, seconds)])
            for way, seconds in zip(ways, found, strict=True)
        ]
    print_table("OpenRLHF's loop, updated by weightsync and by itself", rows, where)
    if args.json:
        write_json(args.json, "openrlhf", rows, where, [])


def _row(way: str, folder: Path, seconds: Sequence[float]) -> dict[str, object]:
    """Summarise a way's updates. Raises WrongWeightsError if the checkpoints say other tokens."""
    said, wanted = (
        [json.loads(line) for line in (folder / each).read_text().splitlines()] for each in ("said", "wanted")
    )
    if said != wanted or len(said) != len(seconds):
        raise WrongWeightsError(f"{way}: the engine said {said}, OpenRLHF's checkpoints {wanted}")
    changed = sum(old != new for old, new in pairwise(said))
    row: dict[str, object] = {"system": way} | spread("total", seconds[NUM_WARM:])
    return row | {"first ms": seconds[0] * 1e3, "compared": len(said) - 1, "with other tokens": changed}


def _prepare(folder: Path, model: str, num_steps: int) -> None:
    """Save a model with random weights, a tokenizer of words, and prompts."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    shape = shape_of(model)
    save_config(shape, folder / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(shape.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w0"
    )
    tokenizer.save_pretrained(folder / "model")
    GenerationConfig(eos_token_id=[0]).save_pretrained(folder / "model")
    prompts = [{"input": f"w{n} w{n + 1}", "label": ""} for n in range(1, num_steps * BATCH + 1)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))


class _Process:
    """This module in a process of its own.

    Attributes:
        logs: the folder of what it writes.
    """

    def __init__(self, role: str, folder: Path, logs: Path, *, cpu: bool) -> None:
        self._role, self.logs = role, logs
        for each in (folder / role, logs):
            each.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "NCCL_NVLS_ENABLE": "0"}
        own["RAY_memory_monitor_refresh_ms"] = "0"  # see `cluster.start_ray`
        command = [sys.executable, "-m", "benchmarks.bench_openrlhf", "--role", role, str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *(["--cpu"] if cpu else [])],
                env=os.environ | ENGINES_ENV | own | {SAID: str(folder / role / "said")},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    @property
    def _log(self) -> Path:
        return self.logs / f"openrlhf-{self._role}.log"

    def end(self, lines: str = "") -> str:
        """Give it `lines`, and wait for its end. Returns what it wrote. Raises RuntimeError if it fails."""
        self._process.communicate(lines)
        wrote = self._log.read_text()
        if self._process.returncode:
            raise RuntimeError(f"{self._role} failed:\n{wrote[-3000:]}")
        return wrote


def _train(way: str, folder: Path, *, cpu: bool) -> None:
    """Run OpenRLHF's script, as a user of `weightsync.plugins.openrlhf` does if `way` is "ours"."""
    import ray

    files = f"""
    --actor.model_name_or_path {folder}/model --data.prompt_dataset {folder}/prompts.jsonl
    --train.agent_func_path {Path(__file__).with_name("openrlhf_agent.py")}
    --ckpt.path {folder}/{way}/steps --ckpt.output_dir {folder}/{way}/trained
    """
    sys.argv = ["train.py", *_FLAGS.split(), *files.split(), *([] if cpu else _COLOCATED.split())]
    ray.init(num_cpus=16, num_gpus=2 if cpu else 1, include_dashboard=False)
    if way == "ours":
        import weightsync.plugins.openrlhf

        weightsync.plugins.openrlhf.install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    ray.shutdown()


def _say(folder: Path) -> None:
    """For ways that come on stdin, write the tokens of a vLLM that loads one checkpoint after another."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / "model"),
        dtype="bfloat16",
        max_model_len=_MAX_LEN,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 28,  # unmeasured: others allocate at the same time
        enable_prefix_caching=False,
    )
    for way in map(str.strip, sys.stdin):
        steps = (folder / way / "steps").glob("global_step*_hf")
        found = []
        # No batch followed the last step.
        for step in [folder / "model", *sorted(steps, key=lambda each: int(each.name[11:-3]))][:-1]:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(step)})
            made = [llm.generate({"prompt_token_ids": each}, SamplingParams(**GREEDY)) for each in PROMPTS]
            found.append([list(each.outputs[0].token_ids) for (each,) in made])
        (folder / way / "wanted").write_text("\n".join(map(json.dumps, found)))


if __name__ == "__main__":
    main()
