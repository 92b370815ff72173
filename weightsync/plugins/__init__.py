"""What other frameworks import, each module its own; nothing of ours imports them, and they are all edge."""

from __future__ import annotations

from contextlib import suppress

__all__ = ["register_vllm"]


def register_vllm() -> None:
    """Let vLLM know the weight transfer backend ``weightsync``, by name: nothing else is imported for it.

    vLLM calls this in each of its processes, through the entry point ``vllm.general_plugins``. A trainer
    calls it before vLLM's ``WeightTransferTrainerFactory``. A vLLM without weight transfer is left alone.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    with suppress(ValueError):  # it is registered already
        factory.WeightTransferEngineFactory.register_engine(
            "weightsync", f"{__name__}.vllm", "WeightSyncTransferEngine"
        )
    if trainers := getattr(factory, "WeightTransferTrainerFactory", None):
        with suppress(ValueError):
            trainers.register_engine("weightsync", f"{__name__}.vllm_trainer", "WeightSyncTrainerEngine")
