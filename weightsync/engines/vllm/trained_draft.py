"""A draft model of vLLM that updates write: the checkpoint's tensors, and a reload of the draft's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.engines.drafts.draft_model import own_modules
from weightsync.engines.drafts.trained_draft import TrainableDraft
from weightsync.engines.loading.checkpoint import Checkpoint, checkpoint_of
from weightsync.engines.vllm import mtp
from weightsync.engines.vllm.api import ModelRunner, draft_files, file_headers, model_folder
from weightsync.engines.vllm.reload import LayerwiseReload
from weightsync.engines.vllm.storage import why_not_live
from weightsync.errors import ConfigError
from weightsync.memory.tensors import meta_of
from weightsync.plan import TensorMeta

_WHOLE_MODEL = "draft_model"
_METHODS = (_WHOLE_MODEL, "eagle", "eagle3", mtp.MTP)
_FREEZE = 'freeze it with SyncConfig(components={"draft": "frozen"})'
_EMBEDDING = "embed_tokens.weight"
_NEVER_LOADED = "t2d"
"""EAGLE-3's map from the target's tokens to the draft's, which vLLM does not use."""


@dataclass(frozen=True, slots=True)
class VllmTrainedDraft(TrainableDraft):
    """A draft model, EAGLE, EAGLE-3, or MTP layers of the target's checkpoint.

    Attributes:
        target: the model that the draft speculates for.
        config: vLLM's configuration of the draft.
        own: the draft's modules that are not the target's, which a reload loads.
    """

    target: torch.nn.Module
    config: Any
    device: torch.device
    own: _OwnModules = field(repr=False)

    @classmethod
    def of(
        cls, runner: ModelRunner, draft: torch.nn.Module, path: str, device: torch.device
    ) -> VllmTrainedDraft:
        """Return the draft of a rank. Raises ConfigError if no update could write all of it."""
        speculative: Any = runner.vllm_config.speculative_config
        config, target = speculative.draft_model_config, runner.get_model()
        value = {"method": speculative.method, "model": path}
        if speculative.method not in _METHODS:
            remedy = f"only drafts of the methods {', '.join(_METHODS)} can be trained: {_FREEZE}"
            raise ConfigError("speculative_config", value, remedy)
        if speculative.method == mtp.MTP and not mtp.prefixes(config.hf_config):
            found = config.hf_config.architectures[0]
            remedy = f"of MTP, only {', '.join(mtp.ARCHITECTURES)} can be trained, not {found}: {_FREEZE}"
            raise ConfigError("speculative_config", value, remedy)
        num_stages = runner.vllm_config.parallel_config.pipeline_parallel_size
        for setting, given in (
            ("speculative_config.parallel_drafting", getattr(speculative, "parallel_drafting", False)),
            ("speculative_config.quantization", config.quantization),
            ("quantization", runner.model_config.quantization),
            ("pipeline_parallel_size", num_stages if num_stages > 1 else None),
        ):
            if given:
                remedy = f"leave it out, since a draft with it is not trained, or {_FREEZE}"
                raise ConfigError(setting, given, remedy)
        own = _OwnModules(draft, target)
        if name := next(_in_memory_of(target, own), ""):
            remedy = f"{name} is in the memory of the target, in a layer that the draft has alone: {_FREEZE}"
            raise ConfigError("speculative_config", value, remedy)
        return cls(str(speculative.method), path, draft, target, config, device, own)

    def checkpoint(self) -> Checkpoint:
        """Return the tensors of the draft's model in transformers; for other methods, of the draft's files.

        Raises ConfigError if the files have no MTP layers.
        """
        if self.method == _WHOLE_MODEL:
            return checkpoint_of(model_folder(self.config), self.config.dtype)
        shared, begin = self.shared(), self._begin()
        stored = self._layers(begin) if begin else self._stored()
        return Checkpoint(tuple(each for each in stored if each.name not in shared), (), frozenset())

    def _layers(self, begin: tuple[str, ...]) -> Sequence[TensorMeta]:
        """Return the tensors of MTP layers, from the headers of the target's files."""
        dtype = str(self.config.dtype).removeprefix("torch.")
        wide = mtp.held_in_float32(self.model)
        if found := mtp.tensors_of(file_headers(self.config), begin, dtype, wide):
            return found
        remedy = f"its safetensors files have no {begin[0]}*: give those of a checkpoint with MTP layers"
        raise ConfigError("speculative_config.model", self.path, remedy)

    def _stored(self) -> Iterator[TensorMeta]:
        """Yield the tensors of the files, in the engine's dtype: transformers does not know these models."""
        for name, tensor in draft_files(self.model, self.config):
            if _NEVER_LOADED not in name:
                dtype = self.config.dtype if tensor.is_floating_point() else tensor.dtype
                yield meta_of(name, torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def shared(self) -> Mapping[str, str]:
        """Return the target's parameters that the draft uses. Files name them with or without ``model.``."""
        theirs = {id(module): path for path, module in self.target.named_modules()}
        found: dict[str, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if id(module) in theirs:
                for leaf, _ in module.named_parameters(recurse=False):
                    held = f"{theirs[id(module)]}.{leaf}"
                    found |= {f"{path}.{leaf}": held, f"{path.removeprefix('model.')}.{leaf}": held}
        if embedding := found.get(f"model.{_EMBEDDING}"):  # checkpoints repeat it in each MTP layer
            found |= {f"{layer}{_EMBEDDING}": embedding for layer in self._begin()}
        return found

    def _begin(self) -> tuple[str, ...]:
        return mtp.prefixes(self.config.hf_config) if self.method == mtp.MTP else ()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the draft's ``load_weights`` once per tensor: EAGLE-3's would collect all tensors first."""
        for each in weights:
            self.model.load_weights([each])  # type: ignore[operator]

    def loader(self) -> LayerwiseReload:
        """Begin a reload of the draft's own modules."""
        return LayerwiseReload(self.own, self.config, self.device).witness()

    def stored_otherwise(self) -> str:
        """Return the layer that may repack weights, "" if no layer does."""
        return why_not_live(self.own, self.device)


def _in_memory_of(target: torch.nn.Module, own: torch.nn.Module) -> Iterator[str]:
    theirs = {each.untyped_storage().data_ptr() for each in target.parameters() if each.numel()}
    for name, each in own.named_parameters():
        if each.numel() and each.untyped_storage().data_ptr() in theirs:
            yield name


class _OwnModules(torch.nn.Module):
    """A draft without the modules of the target, for vLLM's layerwise reload."""

    def __init__(self, draft: torch.nn.Module, target: torch.nn.Module) -> None:
        super().__init__()
        self._both = draft, target  # in a tuple, they are no children
        self.packed_modules_mapping = getattr(draft, "packed_modules_mapping", {})
        self.load_weights = draft.load_weights

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        return own_modules(*self._both)
