"""What the processes have from which tests fork: torch and transformers imported, kernels compiled.

Importing this does it. It takes seven seconds of a core, and leaves neither threads nor CUDA.
"""

from __future__ import annotations

import gc

from weightsync.protocol.collector import collector_paused

with collector_paused:  # it would look at all that is imported, again and again
    import torch
    import torch._dynamo  # FSDP2 imports it on use
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    from weightsync import testing  # noqa: F401
    from weightsync.engines.torch import torch_module  # noqa: F401
    from weightsync.holder import holder  # noqa: F401
    from weightsync.memory.kernels.digests import warm_up
    from weightsync.memory.kernels.host_table import HostPart, HostTable
    from weightsync.memory.kernels.nonfinite import NonfiniteTable
    from weightsync.plan import Box
    from weightsync.sources import module  # noqa: F401
    from weightsync.sources.checkpoint import checkpoint_store  # noqa: F401


def compile_kernels() -> None:
    """Compile what a publish and an update call."""
    warm_up()
    memory = torch.zeros(8, dtype=torch.uint8)
    part = HostPart(tensor=0, address=memory.data_ptr(), box=Box((0,), (8,)), shape=(8,), itemsize=1)
    HostTable([part], 1)
    NonfiniteTable([("float32", 0, 8)])


def keep_from_collection() -> None:
    """Have no fork collect what is there now: it would copy every page, for a second of a core."""
    gc.collect()
    gc.freeze()


compile_kernels()
keep_from_collection()
