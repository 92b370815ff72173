"""The draft model of an SGLang rank, which starts with the weights of its own checkpoint.

Sources: SGLang's ``speculative/``, ``models/llama_eagle3.py`` and ``models/mimo_mtp.py`` of 0.5.17 and
0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel
from weightsync.engines.drafts.trained_draft import TrainableDraft
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.sglang.api import Loads
from weightsync.engines.sglang.storage import stored_otherwise
from weightsync.errors import ConfigError
from weightsync.memory.tensors import meta_of
from weightsync.plan import TensorMeta

_WITHOUT_WEIGHTS = "NGRAM"
_NEXTN = "NEXTN"
"""The algorithm of a draft that is a layer in the target's checkpoint (MTP). To SGLang, it is EAGLE."""
_KNOWN = ("EAGLE", "EAGLE3", _NEXTN, _WITHOUT_WEIGHTS)
_LAYER_CLASSES = ("NextN", "MTP")
"""How SGLang's names of models end that are such a layer."""
_LAYERS = {"MiMoMTP": "model.mtp_layers.0."}
"""The prefix of names in the checkpoint, by SGLang's models of a layer that can be trained."""
_FREEZE = 'freeze it with SyncConfig(components={"draft": "frozen"})'
_TOKEN_MAPS = ("d2t", "t2d")
"""EAGLE-3's maps between the target's tokens and the draft's. SGLang reads them once, when it starts."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an SGLang engine speculates with a draft model.

    Attributes:
        algorithm: ``speculative_algorithm``.
        path: the place of the draft's checkpoint.
        obstacle: an option with its value, if one is given with which the draft cannot be trained.
    """

    algorithm: str
    path: str
    obstacle: tuple[str, object] | None

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Speculation | None:
        """Read the arguments of ``ServerArgs``, and have SGLang read the draft's weights from its files.

        Returns None for an engine without a draft model. Raises ConfigError for a draft with dummy weights,
        and for an unknown algorithm, whose draft cannot be reached: SGLang's own update of weights fails with
        STANDALONE.
        """
        algorithm = arguments.get("speculative_algorithm")
        if algorithm not in (None, *_KNOWN):
            remedy = f"give one of {', '.join(_KNOWN)}: the draft's weights of others are not reached"
            raise ConfigError("options.speculative_algorithm", algorithm, remedy)
        if algorithm in (None, _WITHOUT_WEIGHTS):
            return None
        if arguments.setdefault("speculative_draft_load_format", "auto") == "dummy":
            remedy = "leave it out: no update brings EAGLE's token maps, or a frozen draft's weights"
            raise ConfigError("options.speculative_draft_load_format", "dummy", remedy)
        given = ((name, arguments.get(name)) for name in ("quantization", "speculative_token_map"))
        obstacle = next(((f"options.{name}", value) for name, value in given if value), None)
        path = arguments.get("speculative_draft_model_path") or arguments["model_path"]
        if algorithm == _NEXTN:  # SGLang has this default only for some models
            arguments["speculative_draft_model_path"] = path
        return cls(str(algorithm), str(path), obstacle)


def draft_of(
    speculation: Speculation,
    draft: torch.nn.Module,
    target: torch.nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    treatment: Treatment | None,
) -> DraftModel:
    """Return the draft of a rank. Raises ConfigError if it is to be trained and cannot be."""
    if treatment != "trained":
        return DraftModel(speculation.algorithm, speculation.path, draft)
    begin = _begin(speculation.algorithm, draft)
    if speculation.obstacle:
        remedy = f"leave it out, since a draft with it is not trained, or {_FREEZE}"
        raise ConfigError(*speculation.obstacle, remedy)
    own = _OwnModules(draft, target)
    return SglangTrainedDraft(
        speculation.algorithm, speculation.path, own, draft, target, dtype, device, begin
    )


def _begin(algorithm: str, draft: torch.nn.Module) -> str:
    """Return the prefix of a draft's names in the files, "" for a draft with its own files.

    Raises ConfigError for a layer of MTP that cannot be trained.
    """
    kind = type(draft).__name__
    if algorithm != _NEXTN and not kind.endswith(_LAYER_CLASSES):
        return ""
    if kind not in _LAYERS:
        remedy = f"of MTP, only {', '.join(_LAYERS)} can be trained, not {kind}: {_FREEZE}"
        raise ConfigError("options.speculative_algorithm", algorithm, remedy)
    num_layers = getattr(getattr(draft, "config", None), "num_nextn_predict_layers", 1)
    if num_layers != 1:
        remedy = f"SGLang loads all of them into one layer of {kind}: {_FREEZE}"
        raise ConfigError("num_nextn_predict_layers", num_layers, remedy)
    return _LAYERS[kind]


@dataclass(frozen=True, slots=True)
class SglangTrainedDraft(TrainableDraft):
    """A draft of EAGLE or EAGLE-3, or a layer of MTP. `model` holds no module of the target.

    Attributes:
        draft: SGLang's module, including modules that it shares with the target.
        target: the model that the draft speculates for.
        dtype: the dtype of both.
        begin: the prefix of the draft's tensors in the files, "" if all tensors of the files belong to the
            draft.
    """

    draft: torch.nn.Module
    target: torch.nn.Module
    dtype: torch.dtype
    device: torch.device
    begin: str

    def checkpoint(self) -> Checkpoint:
        """Return the tensors of the draft's files, in the engine's dtype.

        Transformers does not know these models.

        Raises ConfigError if there are none.
        """
        shared = self.shared()
        if found := tuple(each for each in self._stored() if each.name not in shared):
            return Checkpoint(found, (), frozenset())
        wanted = f"{self.begin}*" if self.begin else "tensors of a draft"
        remedy = f"give a folder with {wanted} in safetensors files, which say what tensors a draft has"
        raise ConfigError("options.speculative_draft_model_path", self.path, remedy)

    def _stored(self) -> Iterator[TensorMeta]:
        from safetensors.torch import safe_open

        for file in sorted(Path(self.path).glob("*.safetensors")):
            with safe_open(file, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith(self.begin) and not any(each in name for each in _TOKEN_MAPS):
                        shape = held.get_slice(name).get_shape()
                        yield meta_of(name, torch.empty(shape, dtype=self.dtype, device="meta"))

    def shared(self) -> Mapping[str, str]:
        """Return the target's parameters that the draft uses. Files name them with or without ``model.``."""
        theirs = {each.data_ptr(): name for name, each in self.target.named_parameters()}
        found: dict[str, str] = {}
        for name, each in self.draft.named_parameters(remove_duplicate=False):
            if held := theirs.get(each.data_ptr()):
                found |= {name: held, name.removeprefix("model."): held}
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the draft's ``load_weights`` once per tensor, so that EAGLE's loader collects nothing."""
        for each in weights:
            self.draft.load_weights([each])  # type: ignore[operator]

    def loader(self) -> Loads:
        """Return the draft's loader, which copies at once."""
        return Loads(self.draft)

    def stored_otherwise(self) -> str:
        """Return the layer that may repack weights, "" if no layer does."""
        return stored_otherwise(self.draft, self.device)


class _OwnModules(torch.nn.Module):
    """A draft without the modules whose parameters are the target's, such as an embedding."""

    def __init__(self, draft: torch.nn.Module, target: torch.nn.Module) -> None:
        super().__init__()
        theirs = {each.data_ptr() for each in target.parameters() if each.numel()}
        self._held = [
            (path, module)
            for path, module in draft.named_modules()
            if not any(each.data_ptr() in theirs for each in module.parameters(recurse=False))
        ]

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        return iter(self._held)
