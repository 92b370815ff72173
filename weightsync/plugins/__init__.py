"""Modules that other frameworks import. The rest of the library does not import them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

__all__ = ["register_sglang", "register_vllm"]

_SGLANG = "sglang.srt.entrypoints.http_server"
_SGLANG_REQUESTS = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register_sglang() -> None:
    """Have SGLang's server join the driver, if ``WEIGHTSYNC_JOIN`` has an address.

    SGLang calls this in every process, through the entry point ``sglang.srt.plugins``.
    """
    if not os.environ.get("WEIGHTSYNC_JOIN") or sys.modules["__main__"].__name__ != "__main__":  # of a rank
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def join(*_: object) -> None:
        from weightsync.actors.servers.sglang import JoinSglang

        import_module(_SGLANG).app.add_middleware(JoinSglang)

    def answer(*asked: object, **options: object) -> object:
        return import_module("weightsync.engines.sglang.served").answer(*asked, **options)

    HookRegistry.register(f"{_SGLANG}.set_global_state", join, HookType.AFTER)
    HookRegistry.register(f"{_SGLANG_REQUESTS}.generate_request", answer, HookType.AROUND)


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
