"""Processes for tests, forked from one that has imported and compiled.

A fresh process needs five seconds of a core for that.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import torch.distributed.fsdp  # noqa: F401 (for the forked processes)
import transformers  # noqa: F401

from weightsync.memory.digests import warm_up


def forking() -> ForkServerContext:
    """Return a context whose processes have this module loaded, without threads or CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


warm_up()
