"""The full-precision checkpoint of an engine's model, without the bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.errors import ConfigError
from weightsync.memory.file_names import FileNames
from weightsync.memory.tensors import meta_of, named_tensors
from weightsync.plan import TensorMeta
from weightsync.plan.layout.experts import expert_parts
from weightsync.plan.layout.segment import CASTABLE

FULL = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of full-precision checkpoints."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of the full-precision checkpoint of a model, without their bytes.

    Attributes:
        tied: pairs of (alias, canonical) names.
        linears: weights of linear layers, which an engine's own checkpoint may have quantised.
        converts, stored: the engine's conversion of the tensors, see `RankLayout`.
    """

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]
    linears: frozenset[str]
    converts: str = ""
    stored: tuple[TensorMeta, ...] = ()

    def as_held(self, model: torch.nn.Module) -> Checkpoint:
        """Return the checkpoint with floats in the dtypes that an engine's `model` holds under their names.

        Engines keep some in float32, such as routers, whatever their own dtype is.
        """
        held = {name: meta_of(name, each).dtype for name, each in named_tensors(model)[0].items()}

        def held_as(meta: TensorMeta) -> TensorMeta:
            dtype = held.get(meta.name, meta.dtype)
            return replace(meta, dtype=dtype) if {dtype, meta.dtype} <= CASTABLE else meta

        return replace(self, tensors=tuple(map(held_as, self.tensors)))


def checkpoint_of(folder: ModelFolder, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint of a folder's model in transformers, with the names in the files.

    Raises ConfigError if transformers has no model for the folder, or computes tensors from the files'
    tensors.
    """
    return checkpoint_of_model(folder.build(dtype, "meta"), folder.path)


def checkpoint_of_model(model: torch.nn.Module, path: str) -> Checkpoint:
    """Return the checkpoint of transformers' model. Raises as `checkpoint_of`."""
    tensors, tied = named_tensors(model)
    in_files = FileNames.of(model, {*tensors, *(alias for alias, _ in tied)})
    metas = tuple(meta_of(in_files.name(name), tensor) for name, tensor in tensors.items())
    shapes = {meta.name: meta.shape for meta in metas}
    for name, stored in in_files.computed.items():
        own = in_files.name(name)
        if [part for part, _ in expert_parts(own, shapes.get(own, ()), shapes)] == [own]:
            remedy = (
                f"transformers computes {name} from {stored} of the files, and the engine loads files: "
                "serve this model with kind torch"
            )
            raise ConfigError("model", path, remedy)
    linears = frozenset(
        in_files.name(f"{path}.weight")
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    return Checkpoint(metas, tuple((in_files.name(a), in_files.name(b)) for a, b in tied), linears)
