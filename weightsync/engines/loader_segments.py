"""From two views that a loader copies between to the segment that says the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weightsync.plan import Box, Segment, TensorMeta

__all__ = ["UnprovableError", "joined", "padding_runs", "segment_of"]

_Dim = tuple[int, int, int]
"""Of a copy's dimension: how many steps, and the step of the source and of the target, in elements."""


class UnprovableError(Exception):
    """A loader does something else than to copy boxes; the message names the parameter."""


def segment_of(
    meta: TensorMeta, source: torch.Tensor, buffer: str, target: torch.Tensor, byte_offset: int
) -> Segment:
    """The box of `meta` that `source` views, and where `target` holds it.

    Args:
        source: a view of a row-major tensor of `meta`'s shape; broadcast to `target`, as ``copy_`` does.
        byte_offset: from the first byte of `buffer` to `target`'s first element.

    Raises:
        UnprovableError: the elements are no box.
    """
    shape = meta.shape
    wide = source.expand(target.shape)
    dims = _coalesced(zip(target.shape, wide.stride(), target.stride(), strict=True))
    steps = _row_major(shape)
    offset = [source.storage_offset() // step % size for step, size in zip(steps, shape, strict=True)]
    extent, strides = [1] * len(shape), [meta.itemsize] * len(shape)
    for count, step, target_step in dims:
        axis = _axis(shape, steps, step)
        while True:
            if axis is None or extent[axis] != 1:
                raise UnprovableError(f"{buffer}: what it takes of {meta.name} is no box")
            strides[axis] = target_step * meta.itemsize
            if offset[axis] + count <= shape[axis]:
                extent[axis] = count
                break
            if offset[axis] or count % shape[axis]:
                raise UnprovableError(f"{buffer}: what it takes of {meta.name} is no box")
            # It runs on into the next row: full rows of this axis, as many steps of the one outside.
            extent[axis] = shape[axis]
            count //= shape[axis]
            target_step *= shape[axis]
            axis = next((k for k in reversed(range(axis)) if shape[k] > 1), None)
    return Segment(meta.name, Box(tuple(offset), tuple(extent)), buffer, byte_offset, tuple(strides))


def padding_runs(view: torch.Tensor, byte_offset: int) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of each contiguous run of bytes of a view that starts at `byte_offset`."""
    dims = _coalesced(zip(view.shape, view.stride(), view.stride(), strict=True))
    itemsize = view.element_size()
    nbytes = itemsize
    if dims and dims[-1][1] == 1:
        nbytes *= dims.pop()[0]
    starts = [byte_offset]
    for count, step, _ in dims:
        starts = [start + number * step * itemsize for start in starts for number in range(count)]
    return ((start, nbytes) for start in starts)


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """The same bytes in fewer segments: a stack's experts, loaded one by one, are one box again."""
    done: list[Segment] = []
    for segment in segments:
        done.append(segment)
        while len(done) > 1 and (both := _join(done[-2], done[-1])):
            done[-2:] = [both]
    return done


def _join(first: Segment, second: Segment) -> Segment | None:
    if (first.tensor, first.buffer) != (second.tensor, second.buffer):
        return None
    a, b = first.box, second.box
    apart = [k for k in range(a.ndim) if (a.offset[k], a.extent[k]) != (b.offset[k], b.extent[k])]
    if len(apart) != 1 or a.end[apart[0]] != b.offset[apart[0]]:
        return None
    (axis,) = apart
    gap = second.byte_offset - first.byte_offset
    step = first.strides[axis] if a.extent[axis] > 1 else gap
    strides = _with(first.strides, axis, step)
    alike = all(b.extent[k] == 1 or stride == strides[k] for k, stride in enumerate(second.strides))
    if gap != step * a.extent[axis] or gap <= 0 or not alike:
        return None
    box = Box(a.offset, _with(a.extent, axis, a.extent[axis] + b.extent[axis]))
    return Segment(first.tensor, box, first.buffer, first.byte_offset, strides)


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _coalesced(dims: Iterable[_Dim]) -> list[_Dim]:
    """Outermost first by the source's steps; dimensions that run on into each other become one."""
    done: list[_Dim] = []
    for count, step, target_step in sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1]):
        if done and done[-1][1:] == (count * step, count * target_step):
            done[-1] = (done[-1][0] * count, step, target_step)
        else:
            done.append((count, step, target_step))
    return done


def _row_major(shape: tuple[int, ...]) -> list[int]:
    steps = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        steps[axis] = steps[axis + 1] * shape[axis + 1]
    return steps


def _axis(shape: tuple[int, ...], steps: list[int], step: int) -> int | None:
    return next((k for k, size in enumerate(shape) if size > 1 and steps[k] == step), None)
