"""Starts SGLang from a checkpoint on disk, without the library in it; writes its answers and what it holds.

python -m tests.gpu.sglang_from_disk TENSOR_PARALLEL_SIZE OPTIONS ANSWERS LIVE MODEL [MODEL …]

OPTIONS are further ones of its engine, in JSON. All that it holds, and not only parameters, is in `held.json`
beside LIVE. Of further models it answers after an
``update_weights_from_disk`` of its own, which is quicker than a start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.sglang_probe import LOADER, OPTIONS, held, live, probe


def main(tensor_parallel_size: str, options: str, answers: str, parameters: str, *models: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    num_ranks, loader = int(tensor_parallel_size), [LOADER]
    engine = Engine(
        model_path=models[0],
        tp_size=num_ranks,
        skip_tokenizer_init=True,
        custom_weight_loader=loader,
        **OPTIONS,
        **json.loads(options),
    )
    said, lives, all_held = [], [], []
    for number, model in enumerate(models):
        if number:
            ok, message = engine.update_weights_from_disk(model)[:2]
            assert ok, message
        said.append(engine.loop.run_until_complete(probe(engine.tokenizer_manager)))
        lives.append(engine.loop.run_until_complete(live(engine.tokenizer_manager, num_ranks)))
        all_held.append(engine.loop.run_until_complete(held(engine.tokenizer_manager, num_ranks)))
    Path(answers).write_text(json.dumps(said))
    Path(parameters).write_text(json.dumps(lives))
    Path(parameters).with_name("held.json").write_text(json.dumps(all_held))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
