"""The part of an update that runs in SGLang's processes, which hold the ranks' parameters."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel
from weightsync.engines.loading.checkpoint import Checkpoint, checkpoint_of
from weightsync.engines.loading.live_digest import addresses_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint, quantization_of, require_stored
from weightsync.engines.quantised.stored_loader import trace_places
from weightsync.engines.rank.rank import Rank
from weightsync.engines.sglang.api import Loads, loaded_layers, model_folder, packed_layers
from weightsync.engines.sglang.channels import trace_channels
from weightsync.engines.sglang.draft import Speculation, draft_of
from weightsync.engines.sglang.lora import LoraSlots
from weightsync.engines.sglang.online import trace_online
from weightsync.engines.sglang.online_proof import require_its_bytes
from weightsync.engines.sglang.rank_calls import Call, reply
from weightsync.engines.sglang.storage import (
    online_layers,
    online_option,
    processed_once,
    require_kept,
    require_no_copies,
    require_online,
    stored_otherwise,
    transposed_layers,
)
from weightsync.errors import ConfigError
from weightsync.plan.layout.formats import FIELD
from weightsync.quantising.stored_places import StoredPlaces

logger = logging.getLogger("weightsync.engines.sglang")

_ranks: dict[int, Rank] = {}
"""The rank of this process, by number."""
_drafts: dict[int, torch.nn.Module] = {}
"""The draft model of this process."""
_LEFT = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore"}
"""The field of a configuration that names unquantised layers, by ``quant_method``."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of an engine, for each of its ranks.

    Attributes:
        dtype: torch's name of the weights' dtype.
        speculation: how the engine speculates, if it does so with a draft model.
        overrides: ``json_model_override_args``.
        trust_remote_code, revision: SGLang's options.
    """

    engine: str
    model_path: str
    dtype: str
    speculation: Speculation | None = None
    overrides: str = "{}"
    trust_remote_code: bool = False
    revision: str | None = None


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[bytes, torch.Tensor]]) -> None:
    """Custom weight loader of SGLang. The only "tensor" is empty, and named by a pickled `Call`.

    SGLang's process ends if the loader raises, so this function does not raise.
    """
    try:
        ((blob, _),) = named_tensors
        call: Call = pickle.loads(blob)
        if call.to_draft:
            _drafts.setdefault(call.rank, model)  # before 0.5.21, the target's loader comes after it
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
        self._stored = StoredCheckpoint()
        self._online = online_layers(model)
        self._places: StoredPlaces | None = None
        self._addresses: Sequence[int] = ()

    def model(self) -> torch.nn.Module:
        return self._model

    def checkpoint(self) -> Checkpoint:
        require_no_copies(self._model)
        quantization = quantization_of(self._folder().config())
        checkpoint = checkpoint_of(self._folder(), self._dtype).as_held(self._model)
        if self._online:
            return self._quantised_online(checkpoint)
        self._stored = StoredCheckpoint.of(checkpoint, quantization)
        if self._stored.formats:
            require_kept(self._model, self._device, self._stored.formats)
        if quantization.groups:
            layers, packed = loaded_layers(self._model), packed_layers(self._model)
            require_stored("SGLang", layers, packed, checkpoint.linears, self._stored.formats)
        if self._stored.formats:
            self._require_places()
        else:
            self._require_loadable()
        return self._stored.described(checkpoint)

    def draft(self, treatment: Treatment | None) -> DraftModel | None:
        speculation = self._settings.speculation
        if speculation is None or self._draft is None:
            return None
        given = getattr(self._folder().config(), FIELD, None)
        if given and not speculation.obstacle:
            speculation = replace(speculation, obstacle=(FIELD, given))
        return draft_of(speculation, self._draft, self._model, self._dtype, self._device, treatment)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._settings.dtype)
        return dtype

    def _folder(self) -> ModelFolder:
        its = self._settings
        return model_folder(its.model_path, its.trust_remote_code, its.revision, its.overrides)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load().load(weights)

    def stored_otherwise(self) -> str:
        if self._stored.formats:
            return "the weights are quantised"
        return stored_otherwise(self._model, self._device)

    def converted(self) -> torch.nn.Module | None:
        return self._model if self._stored.formats else None

    def places(self) -> StoredPlaces | None:
        if not self._stored.formats:
            return None
        addresses = addresses_of(self._model)
        if addresses != self._addresses:
            self._places = self._found_places()
            self._addresses = addresses
        return self._places

    def _found_places(self) -> StoredPlaces:
        if self._online:
            checkpoint = checkpoint_of(self._folder(), self._dtype).as_held(self._model)
            return trace_online(self._model, self._online, checkpoint, self._dtype, self._load)[1]
        if layers := transposed_layers(self._model):
            return trace_channels(self._model, layers, self._stored, self._dtype, self._load)
        return trace_places(self._model, self._stored.tensors, self._stored.formats, self._load)

    def _quantised_online(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the full-precision checkpoint of a model that SGLang has quantised. Raises ConfigError."""
        require_online(self._model, self._device, self._online)
        try:
            require_its_bytes(self._online, self._dtype)
            found = trace_online(self._model, self._online, checkpoint, self._dtype, self._load)
        except UnprovableError as error:
            raise ConfigError(
                *online_option(self._online), f"{error}; or serve this model with vLLM"
            ) from error
        self._stored, self._places = found
        self._addresses = addresses_of(self._model)
        return self._stored.described(checkpoint)

    def loader(self, stored: bool) -> Loader:
        if not self._stored.formats:
            return Loads(self._model, is_counted=True)
        return self._stored.loader(self.places(), self._load, stored)

    def _load(self) -> Loads:
        return Loads(self._model)

    def _require_places(self) -> None:
        """Raise ConfigError if it is not proven that the loader fills all parameters and does but copy."""
        try:
            self.places()
        except UnprovableError as error:
            method = next(iter(self._stored.formats.values())).rule
            remedy = (
                f"SGLang's loader does other than copy these tensors: {error}; name what SGLang leaves as "
                f"it is, and no more, in {_LEFT[method]}, or serve this model with vLLM"
            )
            raise ConfigError(FIELD, method, remedy) from error

    def _require_loadable(self) -> None:
        """Raise ConfigError if a load would not be all that SGLang does with weights."""
        if reason := processed_once(self._model, self._device):
            remedy = f"{reason}, and no load makes up for it: serve it with vLLM"
            raise ConfigError("model", type(self._model).__name__, remedy)
