"""Compares a rank's layout with its layout at connect."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.plan import Box, RankLayout


def difference(before: RankLayout, now: RankLayout) -> str | None:
    """Return the first difference, as a sentence that begins with the tensor's name, or None.

    Names, shapes, dtypes, boxes and ties count. Strides and devices do not.
    """
    return _of_names(before, now) or _of_tensors(before, now) or _of_ties(before, now)


def _of_names(before: RankLayout, now: RankLayout) -> str | None:
    had, has = {meta.name for meta in before.tensors}, {meta.name for meta in now.tensors}
    was_tied, is_tied = dict(before.tied), dict(now.tied)
    for meta in before.tensors:
        if meta.name not in has:
            other = is_tied.get(meta.name)
            return f"{meta.name} is now tied to {other}" if other else f"{meta.name} is gone"
    for meta in now.tensors:
        if meta.name not in had:
            other = was_tied.get(meta.name)
            return f"{meta.name} is no longer tied to {other}" if other else f"{meta.name} is new"
    return None


def _of_tensors(before: RankLayout, now: RankLayout) -> str | None:
    metas = {meta.name: meta for meta in before.tensors}
    for meta in now.tensors:
        known = metas[meta.name]
        if meta != known:
            return f"{meta.name} is {meta.dtype} {meta.shape}, and was {known.dtype} {known.shape}"
    boxes = _boxes(before)
    for name, held in _boxes(now).items():
        if held != boxes.get(name):
            here, there = _describe(held), _describe(boxes.get(name))
            return f"{name} is cut another way: this rank has {here}, and had {there}"
    return None


def _of_ties(before: RankLayout, now: RankLayout) -> str | None:
    was_tied, is_tied = dict(before.tied), dict(now.tied)
    for alias, canonical in was_tied.items():
        if alias not in is_tied:
            return f"{alias} is gone; it was tied to {canonical}"
    for alias, canonical in is_tied.items():
        if canonical != was_tied.get(alias):
            return f"{alias} is now tied to {canonical}"
    return None


def _boxes(layout: RankLayout) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for segment in layout.segments:
        boxes.setdefault(segment.tensor, []).append(segment.box)
    return boxes


def _describe(boxes: Sequence[Box] | None) -> str:
    return " and ".join(f"{box.extent} at {box.offset}" for box in boxes) if boxes else "nothing"
