"""Headers of a checkpoint's safetensors files, checked before any tensor is read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from weightsync.errors import ConfigError, PlanError, nearest, shortened
from weightsync.plan import Box, TensorMeta
from weightsync.plan.layout.balance import Stretch
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.experts import stacked
from weightsync.plan.layout.segment import most_alike
from weightsync.sources.checkpoint.float8_weights import scaled_weights
from weightsync.sources.checkpoint.stored_files import (
    DequantisedFile,
    ScaledWeight,
    StoredFile,
    StoredPlace,
    read_json,
)

_INDEX = ".safetensors.index.json"
_HEAD, _CHUNK_NBYTES = "lm_head.weight", 4 << 20
_LONGEST_NAME = 1000
"""Characters of a tensor's name."""
_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
}


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors of the files. A stretch is in ``files[stretch.buffer]``; `origin` is each tensor's file.

    `tied` has (alias, canonical) names of tensors that the files have twice. `tensors` has them once.
    """

    files: tuple[StoredFile | DequantisedFile, ...]
    tensors: tuple[TensorMeta, ...]
    stretches: tuple[Stretch, ...]
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def origin(self) -> dict[str, str]:
        return {stretch.tensor: str(self.files[stretch.buffer].path) for stretch in self.stretches}


def contents(paths: Sequence[str], exclude: Collection[str] = (), stored: bool = False) -> Contents:
    """Read the headers of `paths`: files, index files, or folders that hold either.

    Single experts are declared as transformers' models stack them, see `stacked`. Float8 weights are declared
    in bfloat16, without their scales, where the ``config.json`` beside a file says how they are quantised.

    Args:
        exclude: names of tensors that no engine takes, as in the files, or patterns, as of `fnmatch`.
        stored: declare all tensors as the files have them, also float8 weights and single experts.

    Raises:
        ConfigError: a file is missing, is not a safetensors file, or is truncated; an index names a
            file that does not exist or is outside the folder; `exclude` fits no tensor of the files.
        PlanError: a tensor is in two files, is not in the file that the index names, or has an
            unknown dtype.
        SourceChangedError: a file changed while its header was read.
    """
    found: dict[str, StoredPlace] = {}
    files: list[StoredFile] = []
    for path, wanted in _resolve(paths):
        file = StoredFile.check(path)
        for name, (meta, start) in _header(file).items():
            if name in found:
                other = found[name].file.path
                raise PlanError(
                    name, f"it is in {other} and in {path}; give files that are of one checkpoint"
                )
            found[name] = StoredPlace(meta, file, start)
        for name in wanted:
            if name not in found or found[name].file is not file:
                raise PlanError(name, f"the index names {path}, but it is not in it; download both again")
        files.append(file)
    names = [*found]
    for pattern in exclude:
        left_out = [name for name in names if fnmatchcase(name, pattern)]
        if not left_out:
            raise ConfigError("exclude", pattern, nearest(pattern, most_alike(pattern, names)))
        for name in left_out:
            found.pop(name, None)
    tied = tuple(_repeated_heads(found))
    for alias, _ in tied:
        del found[alias]
    made = _contents(files, found, [] if stored else scaled_weights(found), stack=not stored)
    return replace(made, tied=tied)


def contents_of_both(
    model: Sequence[str], draft: Sequence[str], exclude: Collection[str] = (), stored: bool = False
) -> Contents:
    """Read the headers of a model's files, and those of its draft, whose names get the prefix `DRAFT`.

    Names in `exclude` that begin with it are of the draft. Otherwise as `contents`.
    """
    of_draft = [name.removeprefix(DRAFT) for name in exclude if name.startswith(DRAFT)]
    of_model = contents(model, [name for name in exclude if not name.startswith(DRAFT)], stored)
    if not draft and not of_draft:
        return of_model
    added, first = contents(draft, of_draft, stored), len(of_model.files)
    stretches = (
        replace(each, tensor=DRAFT + each.tensor, buffer=first + each.buffer) for each in added.stretches
    )
    return Contents(
        (*of_model.files, *added.files),
        (*of_model.tensors, *(replace(meta, name=DRAFT + meta.name) for meta in added.tensors)),
        (*of_model.stretches, *stretches),
        (*of_model.tied, *((DRAFT + alias, DRAFT + name) for alias, name in added.tied)),
    )


def _contents(
    files: Sequence[StoredFile],
    found: Mapping[str, StoredPlace],
    scaled: Sequence[ScaledWeight],
    *,
    stack: bool,
) -> Contents:
    """Replace the weights of `scaled` by bfloat16 ones, in a further file for each that has some."""
    numbers = {file: number for number, file in enumerate(files)}
    held = {name: (place.meta, numbers[place.file], place.start) for name, place in found.items()}
    by_file: dict[Path, list[ScaledWeight]] = {}
    for weight in scaled:
        by_file.setdefault(weight.values.file.path, []).append(weight)
        del held[weight.scales.meta.name]
    more = [DequantisedFile(path, weights) for path, weights in by_file.items()]
    for number, (file, weights) in enumerate(zip(more, by_file.values(), strict=True), start=len(files)):
        for weight, start in zip(weights, file.starts, strict=True):
            held[weight.values.meta.name] = weight.meta, number, start
    whole = [
        Stretch(meta.name, Box.whole(meta.shape), meta.itemsize, number, start)
        for meta, number, start in held.values()
    ]
    metas = [meta for meta, _, _ in held.values()]
    return Contents((*files, *more), *(stacked(metas, whole) if stack else (tuple(metas), tuple(whole))))


def _resolve(paths: Sequence[str]) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield each file, with its tensors according to an index, if there is one."""
    for given in dict.fromkeys(paths):
        path = Path(given)
        if os.path.isdir(path):  # pathlib raises for names that are too long
            (index, *_) = [*sorted(path.glob(f"*{_INDEX}")), None]
            held = sorted(path.glob("*.safetensors"))
            if not held and index is None:
                raise ConfigError("files", given, "no *.safetensors is in this folder")
            yield from _indexed(index) if index else ((each, ()) for each in held)
        elif not os.path.exists(path):
            raise ConfigError("files", given, _remedy(path))
        elif path.name.endswith(_INDEX):
            yield from _indexed(path)
        else:
            yield path, ()


def _indexed(index: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise ConfigError("files", str(index), "it is no index: it has no weight_map; download it again")
    by_file: dict[str, list[str]] = {}
    for tensor, file in named.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            told = f"it names {shortened(repr(file))} for {shortened(tensor)}"
            raise ConfigError("files", str(index), f"{told}: give the name of a file in the index's folder")
        by_file.setdefault(file, []).append(tensor)
    for file, tensors in sorted(by_file.items()):
        path = index.parent / file
        if not os.path.exists(path):
            remedy = f"it names {shortened(file)} for {shortened(tensors[0])}; {_remedy(path)}"
            raise ConfigError("files", str(index), remedy)
        yield path, tensors


def _remedy(path: Path) -> str:
    others = [each.name for each in path.parent.glob("*.safetensors")] if os.path.isdir(path.parent) else []
    told = f"there is no {shortened(path.name)} in {shortened(str(path.parent))}"
    return told + (f"; {nearest(path.name, others)}" if others else "")


def _header(file: StoredFile) -> dict[str, tuple[TensorMeta, int]]:
    """Return each tensor, and its first byte in the file."""
    from safetensors import SafetensorError, safe_open

    try:
        # It also checks that tensors follow each other without holes, up to the end of the file.
        with file.opened() as fd, safe_open(f"/proc/self/fd/{fd}", framework="numpy") as opened:
            metas = [_meta(file.path, name, opened.get_slice(name)) for name in opened.offset_keys()]
    except (SafetensorError, OSError) as error:
        remedy = f"it is truncated, or not a safetensors file: {error}; download it again"
        raise ConfigError("files", str(file.path), remedy) from error
    start = file.nbytes - sum(meta.nbytes for meta in metas)
    held = {}
    for meta in metas:
        held[meta.name] = meta, start
        start += meta.nbytes
    return held


def _meta(path: Path, name: str, held: object) -> TensorMeta:
    if len(name) > _LONGEST_NAME:
        remedy = f"it has a tensor {shortened(name)}: names have at most {_LONGEST_NAME} characters"
        raise ConfigError("files", str(path), remedy)
    dtype, shape = held.get_dtype(), tuple(held.get_shape())  # type: ignore[attr-defined]
    if dtype not in _DTYPES:
        raise PlanError(name, f"dtype {dtype} in {path}; {nearest(dtype, _DTYPES)}")
    return TensorMeta(name, _DTYPES[dtype], shape)


def _repeated_heads(found: Mapping[str, StoredPlace]) -> Iterator[tuple[str, str]]:
    """Yield (head, embedding) where ``config.json`` ties both, and the files have the same bytes for both.

    Loaders of tied models pass over such a head. One with other bytes is not found here.
    """
    for name, head in found.items():
        if name.endswith(_HEAD) and _is_tied(head.file.path.parent / "config.json"):
            for other, place in found.items():
                if other != name and _are_equal(head, place):
                    yield name, other
                    break


def _is_tied(path: Path) -> bool:
    config = read_json(path) if path.exists() else {}
    return any(each.get("tie_word_embeddings") is True for each in (config, config.get("text_config") or {}))


def _are_equal(head: StoredPlace, other: StoredPlace) -> bool:
    import torch

    if (head.meta.shape, head.meta.dtype) != (other.meta.shape, other.meta.dtype):
        return False
    numel, most = head.meta.numel, _CHUNK_NBYTES // head.meta.itemsize
    for first in range(0, numel, most):
        count = min(most, numel - first)
        if not torch.equal(*(place.read(first, count).view(torch.uint8) for place in (head, other))):
            return False
    return True
