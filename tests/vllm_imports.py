"""vLLM imported for several engines: those of one process, or of its forks.

Each engine would look through all that a process has imported, for kernels and for garbage. In a process of
tests that takes seconds of a core.
"""

from __future__ import annotations

import functools
import gc

from packaging.version import Version

from weightsync.engines.serving.checks import installed
from weightsync.engines.vllm.api import set_environment
from weightsync.protocol.collector import collector_paused


def vllm_before(version: str) -> bool:
    """Return whether the installed vLLM, if any, is older than a version."""
    found = installed("vllm")[1]
    return bool(found) and Version(found) < Version(version)


@functools.cache
@collector_paused
def import_vllm() -> None:
    """Import what engines need, look for kernels once, and keep what is there now out of collections."""
    set_environment()
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401
        from vllm.model_executor.models import registry

        # It would look at each architecture in a process of its own, for nine seconds of a core.
        vars(registry)["_run_in_subprocess"] = lambda look: look()

        if look := current_platform.register_triton_kernel_overrides:  # None before 0.31
            current_platform.register_triton_kernel_overrides = functools.cache(look)
    gc.collect()
    gc.freeze()
    # Engines keep themselves out of collections, and bring back everything when they end.
    gc.freeze = gc.unfreeze = lambda: None
