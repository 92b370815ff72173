"""A detokenizer of SGLang that answers late; run by test_sglang_late.py.

python -m tests.contract.sglang_late_run FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.contract.conftest import Rig
from tests.contract.request_loops import until
from tests.patience import patient
from weightsync.engines.base import Rollout

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
NUM_TOKENS, STOP = 64, 32
"""The pass at which the update comes, of as many as there are tokens."""


def late_tokens_have_the_version_that_made_them(rig: Rig) -> None:
    """The detokenizer stops before the requests, and continues once the next version serves."""
    rig.update(rig.models[0], 1)
    (before,) = rig.generate(PROMPTS[:1], STOP // 2).result(patient(60)).tokens
    rollout = _updated_midway(rig, 2, PROMPTS, {})
    for prompt, tokens, segments in zip(PROMPTS, rollout.tokens, rollout.segments, strict=True):
        (first, num_before), (second, num_after) = segments
        assert (first, second, num_before + num_after) == (1, 2, NUM_TOKENS)
        assert STOP - 3 <= num_before <= STOP, segments
        assert rig.serves(rig.models[0], [prompt], [tokens[:num_before]], num_before)
        assert rig.serves(rig.models[1], [prompt + tokens[:num_before]], [tokens[num_before:]], num_after)
    rig.update(rig.models[0], 3)
    stopped = _updated_midway(rig, 4, PROMPTS[:1], {"ignore_eos": True, "stop_token_ids": before[-1:]})
    assert stopped.finish_reasons == ["stop"]
    assert stopped.tokens == [before[: before.index(before[-1]) + 1]]
    assert stopped.segments == [[(3, len(stopped.tokens[0]))]]


def _updated_midway(
    rig: Rig, version: int, prompts: list[list[int]], settings: Mapping[str, object]
) -> Rollout:
    processes = map(psutil.Process, rig.engine.loop.server.pids)
    (detokenizer,) = (each for each in processes if "detoken" in " ".join(each.cmdline()))
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0.0, **settings}
    with rig.stopped_at(STOP) as (arrived, go_on):
        detokenizer.suspend()
        try:
            made = rig.threads.submit(rig.engine.generate, prompts, settings)
            assert arrived.wait(patient(60))
            asked = rig.threads.submit(rig.update, rig.models[1], version)
            until(rig.is_asked_to_pause)
            go_on.set()
            asked.result(patient(60))
        finally:
            detokenizer.resume()
    return made.result(patient(60))


def main(folder: Path) -> None:
    rig = Rig("sglang", False, "host", folder)
    try:
        late_tokens_have_the_version_that_made_them(rig)
    finally:
        rig.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
