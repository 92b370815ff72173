"""Starts SGLang from a checkpoint on disk, without any of our code in it, and writes its answers.

python -m tests.gpu.sglang_from_disk TENSOR_PARALLEL_SIZE ANSWERS MODEL [MODEL …]

Of further models it answers after an ``update_weights_from_disk`` of its own, which is quicker than a start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.sglang_probe import OPTIONS, probe


def main(tensor_parallel_size: str, answers: str, *models: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=models[0], tp_size=int(tensor_parallel_size), skip_tokenizer_init=True, **OPTIONS
    )
    found = [engine.loop.run_until_complete(probe(engine.tokenizer_manager))]
    for model in models[1:]:
        ok, message = engine.update_weights_from_disk(model)[:2]
        assert ok, message
        found.append(engine.loop.run_until_complete(probe(engine.tokenizer_manager)))
    Path(answers).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
