"""Modules that other frameworks import. The rest of the library does not import them."""

from __future__ import annotations

from contextlib import suppress

__all__ = ["register_vllm"]


def register_vllm() -> None:
    """Register the weight transfer backend ``weightsync`` with vLLM, without importing it.

    vLLM calls this in every process, through the entry point ``vllm.general_plugins``. A trainer calls this
    before vLLM's ``WeightTransferTrainerFactory``. No effect in a vLLM without weight transfer.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    with suppress(ValueError):  # the backend is registered already
        factory.WeightTransferEngineFactory.register_engine(
            "weightsync", f"{__name__}.vllm", "WeightSyncTransferEngine"
        )
    if trainers := getattr(factory, "WeightTransferTrainerFactory", None):
        with suppress(ValueError):
            trainers.register_engine("weightsync", f"{__name__}.vllm_trainer", "WeightSyncTrainerEngine")
