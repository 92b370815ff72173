"""Processes for tests that need several: forked from one that has imported and compiled what they need.

A fresh process needs five seconds of a core for that before it does anything.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import torch.distributed.fsdp  # noqa: F401 (for those that are forked)
import transformers  # noqa: F401

from weightsync.memory.digests import warm_up


def forking() -> ForkServerContext:
    """A context whose processes have this module; it has no threads and no CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


warm_up()
