"""Starts vLLM from a checkpoint on disk, without any of our code in it; writes its answers and what it holds.

python -m tests.gpu.vllm_from_disk MODEL TENSOR_PARALLEL_SIZE ANSWERS LIVE [OPTIONS]

OPTIONS are further engine arguments, as JSON. All that it holds, and not only parameters, is in `held.json`
beside LIVE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.vllm_probe import OPTIONS, held, live, probe
from weightsync.engines.vllm.api import set_environment


def main(model: str, tensor_parallel_size: str, answers: str, parameters: str, options: str = "{}") -> None:
    set_environment()  # as our engine has it
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            tensor_parallel_size=int(tensor_parallel_size),
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **OPTIONS | json.loads(options),
        )
    )
    Path(answers).write_text(json.dumps(probe(llm)))
    Path(parameters).write_text(json.dumps(live(llm)))
    Path(parameters).with_name("held.json").write_text(json.dumps(held(llm)))
    llm.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
