"""The draft model of a vLLM rank. A frozen draft has the weights of its own checkpoint.

Engines start with dummy weights for the target. vLLM's ``draft_load_config`` still loads EAGLE and MTP drafts
from their files. vLLM 0.32 ignores this setting for the method ``draft_model``, so a frozen draft is loaded
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel, own_tensors, shares_weights
from weightsync.engines.loading.checkpoint import FULL
from weightsync.engines.vllm.api import WITHOUT_WEIGHTS, ModelRunner, draft_files
from weightsync.engines.vllm.reload import LayerwiseReload
from weightsync.engines.vllm.trained_draft import VllmTrainedDraft
from weightsync.errors import ConfigError

_DUMMY = 1e-3
"""vLLM draws dummy weights between this value and its negative. A checkpoint has some larger weights."""


_COLUMNS = ("input_size_per_partition", "input_size", "embedding_dim")
"""The attributes with the number of columns of a layer's weight in this rank, the first that it has."""


class VllmDraft(DraftModel):
    """A draft of vLLM, which on a CPU packs weights of linear layers into memory of oneDNN."""

    def packed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the answers of packed layers to the unit vectors: the weights, to the bit."""
        for path, module in self.model.named_modules():
            columns = next((getattr(module, each) for each in _COLUMNS if hasattr(module, each)), 0)
            if columns and hasattr(module, "cpu_linear"):
                with torch.no_grad():
                    units = torch.eye(columns, dtype=module.weight.dtype)
                    yield path, module.cpu_linear(units, module.weight, None)


def draft_of(runner: ModelRunner, device: torch.device, treatment: Treatment | None) -> DraftModel | None:
    """Return a rank's draft, or None. A frozen draft's dummies are replaced by the draft's files.

    Raises ConfigError if the draft's weights cannot be found, are dummies that cannot be replaced, or cannot
    be trained.
    """
    speculative = runner.vllm_config.speculative_config
    if speculative is None or speculative.method in WITHOUT_WEIGHTS:
        return None
    draft = _module(runner)
    path = str(getattr(speculative.draft_model_config, "model", None) or speculative.model)
    if draft is None:
        if runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return None  # it is in the last stage
        value = {"method": speculative.method, "model": path}
        remedy = "use a draft model, EAGLE, MTP, ngram or suffix: the weights of this method are not found"
        raise ConfigError("speculative_config", value, remedy)
    if runner.vllm_config.parallel_config.enable_eplb and any(
        hasattr(m, "w13_weight") for m in draft.modules()
    ):
        remedy = "leave it out: it moves experts of the draft, whose bytes are compared where they lie"
        raise ConfigError("enable_eplb", True, remedy)
    if treatment == "trained":
        return VllmTrainedDraft.of(runner, draft, path, device)
    target = runner.get_model()
    if treatment == "frozen" and _is_dummy(draft, target):
        if shares_weights(draft, target):
            remedy = (
                'give {"load_format": "auto"}: the draft has dummy weights, and shares some with the target'
            )
            raise ConfigError("speculative_config.draft_load_config", None, remedy)
        _load(draft, speculative.draft_model_config, device)
        if _is_dummy(draft, target):
            remedy = "give the folder of a trained draft: all its weights lie within those of dummies"
            raise ConfigError("speculative_config.model", path, remedy)
    return VllmDraft(str(speculative.method), path, draft)


def _module(runner: ModelRunner) -> torch.nn.Module | None:
    if hasattr(runner, "get_draft_model"):
        return runner.get_draft_model()
    for name in ("drafter", "speculator"):  # before 0.32
        found = getattr(getattr(runner, name, None), "model", None)
        if isinstance(found, torch.nn.Module):
            return found
    return None


def _is_dummy(draft: torch.nn.Module, target: torch.nn.Module) -> bool:
    """Return True if the draft only has dummy weights: no own full-precision element is large."""
    parameters = {id(each) for each in draft.parameters()}
    own = own_tensors(draft, target).values()
    weights = [each for each in own if id(each) in parameters and each.dtype in FULL]
    return bool(weights) and all(float(each.detach().abs().max()) <= _DUMMY for each in weights)


def _load(draft: torch.nn.Module, config: Any, device: torch.device) -> None:  # noqa: ANN401 - vLLM's
    reload = LayerwiseReload(draft, config, device)
    try:
        reload.load(draft_files(draft, config))
        reload.finish()
    except BaseException:
        reload.abandon()
        raise
