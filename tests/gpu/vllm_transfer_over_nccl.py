"""A trainer on the second GPU that sends to a real vLLM on the first by vLLM 0.24's own weight transfer.

    python -m tests.gpu.vllm_transfer_over_nccl FOLDER CHECKPOINT…

The folder is on the path of vLLM's processes too, with the entry points of this project. Writes what vLLM
answers and holds after the last checkpoint to ``answers.json`` and ``live.json`` there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: Path, checkpoints: list[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from tests.gpu.vllm_probe import OPTIONS, live, probe
    from tests.patience import patient
    from weightsync.memory.tensors import named_tensors
    from weightsync.plugins.sender import Sender

    llm = LLM(
        checkpoints[-1],
        load_format="dummy",
        skip_tokenizer_init=True,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
        **OPTIONS,
    )
    say("vLLM is up")
    torch.cuda.set_device(1)
    sender = Sender("127.0.0.1", 2, bucket_nbytes=1 << 20, timeout_s=patient(60))
    with ThreadPoolExecutor(1) as beside:

        def both(theirs: Callable[[], object], ours: Callable[[], object]) -> None:
            waiting = beside.submit(theirs)
            ours()
            waiting.result(patient(60))

        both(lambda: llm.init_weight_transfer_engine({"init_info": sender.init_info}), sender.open)
        say("joined")
        for version, path in enumerate(checkpoints, start=1):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda:1")

            def tensors(model: torch.nn.Module = model) -> Iterator[tuple[str, torch.Tensor]]:
                yield from named_tensors(model)[0].items()

            def send(version: int = version, tensors: Callable[..., object] = tensors) -> None:
                sender.send(tensors(), version)

            llm.start_weight_update()
            both(lambda: llm.update_weights({"update_info": {}}), send)
            llm.finish_weight_update()
            llm.reset_prefix_cache()
            say(f"version {version} is there")
    (folder / "answers.json").write_text(json.dumps(probe(llm.llm_engine)))
    (folder / "live.json").write_text(json.dumps(live(llm.llm_engine)))
    sender.close()
    llm.llm_engine.engine_core.shutdown()


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
