"""Compares a rank's layout with its layout at connect."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.plan import Box, RankLayout, TensorMeta


def difference(before: RankLayout, now: RankLayout) -> str | None:
    """Return the first difference, as a sentence that begins with the tensor's name, or None.

    Names, shapes, dtypes, boxes and ties count. Strides and devices do not.
    """
    had, has = _held(before), _held(now)
    for name in had | has:
        was, is_now = had.get(name), has.get(name)
        if was == is_now:
            continue
        if is_now is None:
            return f"{name} is gone; it was tied to {was}" if isinstance(was, str) else f"{name} is gone"
        if isinstance(is_now, str):
            return f"{name} is now tied to {is_now}"
        if isinstance(was, TensorMeta):
            return f"{name} is {is_now.dtype} {is_now.shape}, and was {was.dtype} {was.shape}"
        return f"{name} is no longer tied to {was}" if was else f"{name} is new"
    boxes = _boxes(before)
    for name, held in _boxes(now).items():
        if held != boxes.get(name):
            here, there = _describe(held), _describe(boxes.get(name))
            return f"{name} is cut another way: this rank has {here}, and had {there}"
    return None


def _held(layout: RankLayout) -> dict[str, TensorMeta | str]:
    """Return each tensor by name, or the tensor to which a name is tied."""
    return {meta.name: meta for meta in layout.tensors} | dict(layout.tied)


def _boxes(layout: RankLayout) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for segment in layout.segments:
        boxes.setdefault(segment.tensor, []).append(segment.box)
    return boxes


def _describe(boxes: Sequence[Box] | None) -> str:
    return " and ".join(f"{box.extent} at {box.offset}" for box in boxes) if boxes else "nothing"
