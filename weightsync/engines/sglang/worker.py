"""The part of an update that runs in SGLang's processes, which hold the ranks' parameters."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightsync.config import Treatment
from weightsync.engines.checkpoint import Checkpoint, checkpoint_of
from weightsync.engines.draft_model import DraftModel
from weightsync.engines.rank import Rank
from weightsync.engines.sglang.api import Loads, stored_otherwise
from weightsync.engines.sglang.draft import Speculation, draft_of
from weightsync.engines.sglang.lora import LoraSlots
from weightsync.engines.sglang.rank_calls import Call, reply
from weightsync.errors import ConfigError, EngineError

logger = logging.getLogger("weightsync.engines.sglang")

_ranks: dict[int, Rank] = {}
"""The rank of this process, by number."""
_drafts: dict[int, torch.nn.Module] = {}
"""Its draft model."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of an engine, for each of its ranks.

    Attributes:
        dtype: torch's name of the weights' dtype.
        repacks: whether SGLang processes weights again after each update, as quantized ones need.
        speculation: how it speculates, if with a draft model.
    """

    engine: str
    model_path: str
    dtype: str
    repacks: bool
    speculation: Speculation | None = None


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[bytes, torch.Tensor]]) -> None:
    """Custom weight loader of SGLang. The only "tensor" is empty, and its name is a pickled `Call`.

    SGLang's process ends if its loader raises, so this does not.
    """
    try:
        ((blob, _),) = named_tensors
        call: Call = pickle.loads(blob)
        if call.to_draft and call.rank not in _drafts:
            _drafts[call.rank] = model  # SGLang calls the target's loader next, with the same data
            return
        args = pickle.loads(call.blob)
        # In inference mode, which serving may use, a tracer would see other operators.
        with torch.inference_mode(False), torch.no_grad():
            reply(call, _rank(model, call).answer(call.method, args))
    except Exception:
        logger.exception("a call failed")


def _rank(model: torch.nn.Module, call: Call) -> Rank:
    if call.rank not in _ranks:
        device = next(model.parameters()).device
        host = SglangHost(model, device, call.settings, _drafts.get(call.rank))
        _ranks[call.rank] = Rank("sglang", call.rank, device, host, LoraSlots(model))
    return _ranks[call.rank]


class SglangHost:
    """The `Host` of an SGLang rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        settings: RankSettings,
        draft: torch.nn.Module | None = None,
    ) -> None:
        self._model, self._device, self._settings, self._draft = model, device, settings, draft

    def model(self) -> torch.nn.Module:
        return self._model

    def checkpoint(self) -> Checkpoint:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._settings.model_path)
        if quantization := getattr(config, "quantization_config", None):
            # SGLang's loader would copy full-precision values into quantised parameters, without scales.
            remedy = "leave it out and start SGLang with quantization='fp8', or serve this format with vLLM"
            raise ConfigError("quantization_config", quantization, remedy)
        return checkpoint_of(config, self._dtype).as_held(self._model)

    def draft(self, treatment: Treatment | None) -> DraftModel | None:
        speculation = self._settings.speculation
        if speculation is None or self._draft is None:
            return None
        return draft_of(speculation, self._draft, self._model, self._dtype, self._device, treatment)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._settings.dtype)
        return dtype

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(weights)  # type: ignore[operator]

    def stored_otherwise(self) -> str:
        return stored_otherwise(self._model, self._device)

    def converted(self) -> torch.nn.Module | None:
        return None

    def places(self) -> None: ...

    def loader(self, stored: bool) -> Loads:
        reason = self.stored_otherwise()
        if reason and not self._settings.repacks:
            raise EngineError(
                self._settings.engine, "load", f"{reason}, and SGLang before 0.5.21 does not do that again"
            )
        return Loads(self._model)
