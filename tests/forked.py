"""Processes for tests, forked from one that has imported and compiled.

A fresh process needs seven seconds of a core for that.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Return a context whose processes start with `tests.warm` imported, without threads or CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def fork(num_ranks: int, run: Callable[..., None], *args: object) -> None:
    """Call ``run(rank, *args)`` in forks of this process, one for each rank, and wait for their ends."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, *args)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * num_ranks


def import_deepspeed() -> None:
    """Import DeepSpeed before its ranks are forked, with what it imports on use: torch's whole compiler."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    from tests.warm import keep_from_collection

    keep_from_collection()
