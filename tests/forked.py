"""Processes for tests, forked from one that has imported and compiled.

A fresh process needs seven seconds of a core for that.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

from tests.patience import patient
from weightsync.protocol.collector import collector_paused


def forking() -> ForkServerContext:
    """Return a context whose processes start with `tests.warm` imported, without threads or CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def said_by(run: Callable[..., None], *args: object, exitcode: int = 0) -> Any:
    """Return what ``run(pipe, *args)`` sends from a process that is forked so, after its end."""
    ours, theirs = forking().Pipe(duplex=False)
    process = forking().Process(target=run, args=(theirs, *args))
    process.start()
    theirs.close()
    with ours:
        said = ours.recv() if ours.poll(patient(60)) else None
    process.join(patient(60))
    assert process.exitcode == exitcode
    return said


def fork(num_ranks: int, run: Callable[..., None], *args: object) -> None:
    """Call ``run(rank, *args)`` in forks of this process, one for each rank, and wait for their ends."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, *args)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * num_ranks


@collector_paused
def import_deepspeed() -> None:
    """Import DeepSpeed before its ranks are forked, with what it imports on use: torch's whole compiler."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    from tests.warm import keep_from_collection

    keep_from_collection()


@collector_paused
def import_megatron() -> None:
    """Import Megatron-Core before its ranks are forked, which would compile a few sums and products each."""
    import torch._dynamo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    from tests.warm import keep_from_collection

    torch._dynamo.config.disable = True
    keep_from_collection()
