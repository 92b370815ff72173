"""Finds the float8 weights of a checkpoint and their scales, by the ``config.json`` beside its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightsync.errors import ConfigError, PlanError
from weightsync.plan.layout.formats import FIELD, MICROSCALING, Format, Quantization
from weightsync.sources.checkpoint.stored_files import ScaledWeight, StoredPlace, read_json

_FLOAT8 = "float8_e4m3fn"


def scaled_weights(found: Mapping[str, StoredPlace]) -> list[ScaledWeight]:
    """Return the float8 weights with known scales, in the order of `found`.

    Weights of files without a ``config.json``, and those that it leaves out, stay as they are stored.

    Raises:
        ConfigError: the ``quantization_config`` is not known here.
        PlanError: a weight's scales are missing, or have another shape than its blocks, or it is MXFP8.
    """
    read: dict[Path, Quantization] = {}
    scaled = []
    for name, place in found.items():
        if place.meta.dtype != _FLOAT8:
            continue
        folder = place.file.path.parent
        if folder not in read:
            read[folder] = _quantization(folder / "config.json")
        form = read[folder].of(name)
        if form is not None and form.values == _FLOAT8:
            scaled.append(_with_scales(place, form, found))
    return scaled


def _quantization(path: Path) -> Quantization:
    if not path.is_file():
        return Quantization()
    given = read_json(path).get(FIELD) or {}
    if not isinstance(given, dict):
        raise ConfigError("files", str(path), f"its {FIELD} is no object: download it again")
    return Quantization.read(given) if given else Quantization()


def _with_scales(place: StoredPlace, form: Format, found: Mapping[str, StoredPlace]) -> ScaledWeight:
    if form.rule in MICROSCALING:
        raise PlanError(place.meta.name, f"it is {form}, which is not read; give a bfloat16 checkpoint")
    _, wanted = form.stored(place.meta)
    scales = found.get(wanted.name)
    if scales is None:
        raise PlanError(wanted.name, f"{place.meta.name} is {form}, and no file has these scales")
    if scales.meta.shape != wanted.shape:
        problem = (
            f"{place.meta.name} {place.meta.shape} is {form}: scales of shape {wanted.shape} belong to it"
        )
        raise PlanError(wanted.name, f"shape {scales.meta.shape}; {problem}")
    rows, columns = (block or size for block, size in zip(form.block, place.meta.shape, strict=True))
    return ScaledWeight(place, scales, (rows, columns))
