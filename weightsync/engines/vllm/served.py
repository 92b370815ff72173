"""Adapter of vLLM behind vLLM's own web server, whose requests may name adapters."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

from weightsync.engines.lora.adapter_engine import AdapterEngine, ServedAdapter
from weightsync.engines.lora.slot_engine import SlotEngine
from weightsync.engines.vllm.adopted import AdoptedVllm, AsyncVllm
from weightsync.engines.vllm.lora import adapted, require_no_sleep
from weightsync.errors import ConfigError
from weightsync.protocol.adapters import AdapterSpec


class ServedVllm(AdoptedVllm, SlotEngine):
    """An ``AsyncLLM`` whose server finds the adapter of a request by the request's ``model``.

    Whoever passes requests on calls `AdapterEngine.use` of `adapters_of` until the answer is complete.
    """

    def __init__(
        self, llm: AsyncVllm, loop: asyncio.AbstractEventLoop, lora_requests: MutableMapping[str, Any]
    ) -> None:
        """`lora_requests`: the server's adapters, by the names that requests give."""
        super().__init__(llm, loop)
        self._lora_requests = lora_requests

    def open_adapter(self, spec: AdapterSpec) -> AdapterEngine:
        """Take two slots. Raises ConfigError also if the server has another adapter of that name."""
        if spec.name in self._lora_requests and spec.name not in self._adapters:
            raise ConfigError("name", spec.name, "choose another: the server has loaded an adapter so called")
        return super().open_adapter(spec)

    def adapters_of(self, model: str | None) -> Sequence[AdapterEngine]:
        """Return the adapters that a request for `model` may use; all of them if that is not known."""
        if model is None:
            return [*self._adapters.values()]
        return [self._adapters[model]] if model in self._adapters else []

    def _take_slots(self, spec: AdapterSpec, numbers: Sequence[int]) -> None:
        require_no_sleep(self._sleeps)

    def _announce(self, name: str, served: ServedAdapter | None) -> None:
        if served:
            self._lora_requests[name] = adapted(name, served.version, served.number, None).lora
        else:
            self._lora_requests.pop(name, None)
