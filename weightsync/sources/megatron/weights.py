"""Declares what a rank of Megatron-Core holds, as boxes of the checkpoint's tensors in its parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from weightsync.errors import ConfigError, PlanError
from weightsync.memory.addresses import is_sharded
from weightsync.memory.tensors import byte_strides
from weightsync.plan import RankLayout, Segment, Stage, TensorMeta
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.megatron.chunks import Chunk, as_chunks, held
from weightsync.sources.megatron.cuts import Array, HeldBox, RankGroup, parts
from weightsync.sources.megatron.families import find_family
from weightsync.sources.megatron.rules import Family, RuleMatch

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def local_weights(
    model: nn.Module | Sequence[nn.Module],
    family: Family | str,
    *,
    vocab_size: int | None,
    exclude: Collection[str] = (),
) -> LocalWeights:
    """Declare this rank's boxes of the checkpoint's tensors. Nothing is copied or gathered.

    Replicas, as of data and context parallelism and of a tied embedding, declare the same boxes. Rows that
    pad the vocabulary are not declared.

    Args:
        model: a ``GPTModel``, or the chunks of this rank's pipeline stage, in wrappers or not.
        family: the names, as a ``model_type`` of `FAMILIES` or a `Family`.
        vocab_size: rows of the checkpoint's embedding, as in its configuration.
        exclude: patterns of names that are left out, of the parameters or of the checkpoint, see `fnmatch`.

    Returns:
        The layout, and the live parameters that it needs by Megatron's names. Those of several chunks begin
        with the chunk's number, as ``0.decoder.layers.0.mlp.router.weight``.

    Raises:
        ConfigError: the family is unknown or has no rule for a parameter, `vocab_size` is unknown or too
            large, or a parameter cannot be declared as it is.
        PlanError: a parameter's shape does not fit the model's sizes, or two chunks have the same layer.
    """
    found, chunks = find_family(family), as_chunks(model, vocab_size)
    declared = _Declared(found, tuple(exclude))
    for number, name, buffer, tensor in held(model):
        declared.add(chunks[number], name, buffer, tensor)
    return declared.weights(chunks)


class _Declared:
    """Collects tensors and segments, parameter by parameter."""

    def __init__(self, family: Family, exclude: tuple[str, ...]) -> None:
        self._family, self._exclude = family, exclude
        self._metas: dict[str, TensorMeta] = {}
        self._segments: dict[str, list[Segment]] = {}
        self._owner: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._excluded: set[str] = set()

    def add(self, chunk: Chunk, name: str, buffer: str, tensor: torch.Tensor) -> None:
        """Declare what the parameter `name` of `chunk` holds, which is `buffer` in the stage."""
        if self._excludes(name):
            return
        match = self._family.match(name)
        _check_plain(buffer, tensor)
        names = self._names(chunk, name, match)
        group = chunk.expert_tensor if match.rule.is_expert else chunk.tensor
        _check_cut(buffer, tensor, match, group)
        array = Array(buffer, tuple(tensor.shape), byte_strides(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        for part in parts(match.rule.cut, array, group, chunk.sizes):
            title = names[part.tensor].format(expert=chunk.expert_number(match.expert + part.expert))
            if not self._excludes(title):
                self._declare(TensorMeta(title, dtype, part.shape), part, buffer)
                self._tensors[buffer] = tensor

    def weights(self, chunks: Sequence[Chunk]) -> LocalWeights:
        """Return everything declared, of these chunks."""
        alias, canonical = self._family.tensor(_OUTPUT), self._family.tensor(_EMBEDDING)
        tied: tuple[tuple[str, str], ...] = ()
        if any(chunk.is_tied for chunk in chunks) and alias and canonical and canonical in self._metas:
            tied = ((alias, canonical),)
        segments = tuple(segment for each in self._segments.values() for segment in each)
        # The embedding is also on the last stage, if the head is tied to it or layers predict more tokens.
        stage = Stage(chunks[0].stage, shared=(canonical,) if canonical else ())
        layout = RankLayout(tuple(self._metas.values()), segments, tied, stage=stage)
        num_experts = max(chunk.num_experts for chunk in chunks)
        return LocalWeights(layout, self._tensors, frozenset(self._excluded), num_experts)

    def _excludes(self, name: str) -> bool:
        found = {pattern for pattern in self._exclude if fnmatchcase(name, pattern)}
        self._excluded |= found
        return bool(found)

    def _names(self, chunk: Chunk, name: str, match: RuleMatch) -> list[str]:
        """Return the checkpoint's names for one parameter, in which ``{expert}`` is still open."""
        titles = match.rule.names
        if chunk.is_tied and name == _OUTPUT:
            titles = (self._family.tensor(_EMBEDDING) or titles[0],)
        layer = chunk.layer(name[: match.layer_end]) if match.layer_end else 0
        return [title.replace("{layer}", str(layer)) for title in titles]

    def _declare(self, meta: TensorMeta, part: HeldBox, buffer: str) -> None:
        segment = Segment(meta.name, part.box, buffer, part.start, part.strides)
        known = self._metas.setdefault(meta.name, meta)
        owner = self._owner.setdefault(meta.name, buffer)
        if owner == buffer:
            self._segments.setdefault(meta.name, []).append(segment)
        elif known != meta or all(segment.box != each.box for each in self._segments[meta.name]):
            raise PlanError(meta.name, f"{owner} and {buffer} of this rank hold it in different boxes")
        elif meta.name != self._family.tensor(_EMBEDDING):
            remedy = "give each chunk of the stage once, with layers of its own"
            raise PlanError(meta.name, f"{owner} and {buffer} both hold it; {remedy}")


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is plain memory."""
    kind = type(tensor)
    if is_sharded(tensor):
        raise ConfigError(name, kind.__name__, "train with Megatron's DDP: FSDP's shards have no boxes here")
    if kind not in (nn.Parameter, torch.Tensor):
        raise ConfigError(name, kind.__name__, "train with plain parameters: these need scales, too")


def _check_cut(name: str, tensor: torch.Tensor, match: RuleMatch, group: RankGroup) -> None:
    """Raise if Megatron says that it cuts the parameter along another dimension than the rule.

    Layers that are not initialised do not say it, and Transformer Engine says it of some that are whole.
    """
    cut = match.rule.cut
    if group.size == 1 or not getattr(tensor, "tensor_model_parallel", False):
        return
    axis = getattr(tensor, "partition_dim", -1)
    if not cut.is_latent and axis != cut.axis:
        raise ConfigError(f"the rule for {name}", cut.value, f"Megatron cuts it along dimension {axis}")
