"""The part of an update that runs in vLLM's workers, which hold the ranks' parameters."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel
from weightsync.engines.loading.checkpoint import Checkpoint, checkpoint_of
from weightsync.engines.loading.live_digest import addresses_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.loading.wrapped import unwrapped
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint, quantization_of, require_stored
from weightsync.engines.quantised.stored_loader import find_places
from weightsync.engines.rank.rank import Rank
from weightsync.engines.vllm.api import (
    ModelRunner,
    asleep,
    building,
    loaded_layers,
    model_folder,
    packed_layers,
    require_one_replica,
    require_updatable,
)
from weightsync.engines.vllm.draft import draft_of
from weightsync.engines.vllm.eplb import BalancedExperts, loads_whole
from weightsync.engines.vllm.lora import LoraSlots
from weightsync.engines.vllm.online import online_loader, trace_online
from weightsync.engines.vllm.online_proof import loaded_weights, online_layers, require_online
from weightsync.engines.vllm.reload import LayerwiseReload, rehearse
from weightsync.engines.vllm.storage import quantized_again, stored_otherwise
from weightsync.errors import PlanError
from weightsync.plan import RankLayout, TensorMeta
from weightsync.plan.layout.arrangement import Experts
from weightsync.quantising.stored_places import StoredPlaces

logger = logging.getLogger("weightsync.engines.vllm")


class WeightSyncWorker:
    """Mixed into vLLM's worker class, so it must not define names that the worker has."""

    if TYPE_CHECKING:
        rank: int
        device: torch.device
        model_runner: ModelRunner
        _ws_rank: Rank

    def ws_call(self, blob: bytes) -> bytes:
        """Call a method of this worker's `Rank`. Returns the result or the error, pickled.

        This method must not raise: vLLM reads the ranks' answers in order, and would leave the remaining
        answers to the next call.
        """
        if not hasattr(self, "_ws_rank"):
            host, slots = VllmHost(self.model_runner, self.device), LoraSlots(self.model_runner)
            self._ws_rank = Rank("vllm", self.rank, self.device, host, slots)
        method, args = pickle.loads(blob)
        return pickle.dumps(self._ws_rank.answer(method, args))


class VllmHost:
    """The `Host` of a vLLM rank."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner, self._device = runner, device
        self._stored = StoredCheckpoint()
        self._whole: Checkpoint | None = None
        self._online = StoredCheckpoint()
        self._places: StoredPlaces | None = None
        self._addresses: Sequence[int] = ()

    @cached_property
    def _experts(self) -> BalancedExperts | None:
        balances = self._runner.vllm_config.parallel_config.enable_eplb
        return BalancedExperts(self._runner) if balances else None

    def model(self) -> torch.nn.Module:
        return self._runner.get_model()

    def asleep(self) -> Collection[str]:
        return asleep()

    def checkpoint(self) -> Checkpoint:
        require_updatable(self._runner.vllm_config, self.model())
        require_one_replica(self._runner.vllm_config)
        config = self._runner.model_config
        quantization = quantization_of(config.hf_config)
        with building(self._runner.vllm_config):
            checkpoint = checkpoint_of(model_folder(config), config.dtype)
        checkpoint = checkpoint.as_held(self.model())
        self._whole, self._stored = checkpoint, StoredCheckpoint.of(checkpoint, quantization)
        if not quantization.groups:
            return self._quantised_online(checkpoint)
        layers, packed = loaded_layers(self.model()), packed_layers(self.model())
        require_stored("vLLM", layers, packed, checkpoint.linears, self._stored.formats)
        return self._stored.described(checkpoint)

    def _quantised_online(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with vLLM's conversions. vLLM still loads full-precision tensors."""
        if (addresses := addresses_of(self.model())) != self._addresses:
            self._addresses = addresses
            self._online, self._places = self._found_online(checkpoint)
        self._stored = self._online
        return replace(self._stored.described(checkpoint), stored=())  # no checkpoint stores that

    def _found_online(self, checkpoint: Checkpoint) -> tuple[StoredCheckpoint, StoredPlaces | None]:
        """Find the tensors that vLLM quantises during loading.

        Without a proof, returns nothing and logs a line.
        """
        model = self.model()
        if not (layers := online_layers(model)):
            return StoredCheckpoint(), None
        try:
            loaded = loaded_weights(layers, loaded_layers(model))
            require_online(model, loaded)
            return trace_online(model, loaded, checkpoint, self._reload)
        except (UnprovableError, PlanError) as error:
            logger.warning("vLLM quantises in each update, see docs/quantised.md: %s", error)
            return StoredCheckpoint(), None

    def draft(self, treatment: Treatment | None) -> DraftModel | None:
        return draft_of(self._runner, self._device, treatment)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with unwrapped(self.model()):
            self.model().load_weights(weights)  # type: ignore[operator]

    def stored_otherwise(self) -> str:
        why = stored_otherwise(self._runner, self._device)
        if why and self._experts:
            raise loads_whole(why)
        return why

    def experts(self) -> Experts:
        return self._experts.experts() if self._experts else ()

    def move_experts(self, experts: Experts) -> None:
        assert self._experts, "the driver only asks engines that move experts"
        self._experts.move(experts)

    def arranged(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> RankLayout:
        return self._experts.arranged(layout, live) if self._experts else layout

    def converted(self) -> torch.nn.Module | None:
        return self.model() if self._stored.formats else None

    def places(self) -> StoredPlaces | None:
        model = self.converted()
        if model is None:
            return None
        addresses = addresses_of(self.model())
        if addresses != self._addresses and self._online.formats:
            assert self._whole
            self._addresses = addresses
            found, places = self._found_online(self._whole)
            self._places = places if found == self._online else None
        elif addresses != self._addresses:
            self._addresses = addresses
            tensors, formats, obstacle = self._stored.tensors, self._stored.formats, quantized_again(model)
            self._places = find_places(model, tensors, formats, self._reload, self._device, obstacle)
        return self._places

    def loader(self, stored: bool) -> Loader:
        if self._online.formats:
            return online_loader(self._online.formats, self.places(), self._load)
        return self._stored.loader(self.places(), self._load, stored)

    def rehearse(self) -> Sequence[TensorMeta]:
        if self._experts:
            raise loads_whole("not all ranks can be written in place, see the log")
        if self._whole is None or self._stored.formats:
            return ()
        return rehearse(self.model(), self._runner.model_config, self._device, self._whole.tensors)

    def _load(self) -> LayerwiseReload:
        return self._reload().witness()

    def _reload(self) -> LayerwiseReload:
        return LayerwiseReload(self._runner.get_model(), self._runner.model_config, self._device)
