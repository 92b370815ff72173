"""Finds where a loader puts each element, by running it without changing weights.

The loader gets placeholders. A dispatch mode sees every ``copy_`` from a placeholder into a live parameter,
records both views and skips the copy. The views' offsets and strides give the layout. `check_live` then
proves that it writes each live byte exactly once. A tensor that is stored as another float is declared as
that, so that it comes as the engine holds it. A loader that computes something in between (a transposed copy)
is detected and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import PlanError
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import meta_of, metas_of
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.segment import CASTABLE

_Dim = tuple[int, int, int]
"""A dimension of a copy: number of steps, and the steps of source and target, in elements."""


class UnprovableError(Exception):
    """A loader does more than copy boxes. The message names the parameter."""


def segment_of(
    meta: TensorMeta, source: torch.Tensor, buffer: str, target: torch.Tensor, byte_offset: int
) -> Segment:
    """Return the box of `meta` that `source` views, and where `target` holds it.

    Args:
        source: a view of a row-major tensor of `meta`'s shape; broadcast to `target`, as ``copy_`` does.
        byte_offset: from the first byte of `buffer` to `target`'s first element.

    Raises:
        UnprovableError: the elements are not a box.
    """
    shape = meta.shape
    wide = source.expand(target.shape)
    dims = _coalesced(zip(target.shape, wide.stride(), target.stride(), strict=True))
    steps = _row_major(shape)
    offset = [source.storage_offset() // step % size for step, size in zip(steps, shape, strict=True)]
    extent, strides = [1] * len(shape), [meta.itemsize] * len(shape)
    for count, step, target_step in dims:
        axis = next((k for k, size in enumerate(shape) if size > 1 and steps[k] == step), None)
        while True:
            if axis is None or extent[axis] != 1:
                raise UnprovableError(f"{buffer}: the loader reads a non-rectangular part of {meta.name}")
            strides[axis] = target_step * meta.itemsize
            if offset[axis] + count <= shape[axis]:
                extent[axis] = count
                break
            if offset[axis] or count % shape[axis]:
                raise UnprovableError(f"{buffer}: the loader reads a non-rectangular part of {meta.name}")
            # The run continues in the next row: full rows of this axis, and steps of the outer axis.
            extent[axis] = shape[axis]
            count //= shape[axis]
            target_step *= shape[axis]
            axis = next((k for k in reversed(range(axis)) if shape[k] > 1), None)
    return Segment(meta.name, Box(tuple(offset), tuple(extent)), buffer, byte_offset, tuple(strides))


def padding_runs(view: torch.Tensor, byte_offset: int) -> Iterator[tuple[int, int]]:
    """Return (offset, nbytes) of each contiguous run of a view that starts at `byte_offset`."""
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
    """Join segments where possible: a stack's experts, loaded one by one, become one box."""
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
    """Sort dimensions by the source's steps, outermost first, and merge contiguous ones."""
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


_ATEN = torch.ops.aten
_FILLS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)


@dataclass(frozen=True, slots=True)
class Traced:
    """A layout with live buffers, and the tensors of these buffers."""

    layout: RankLayout
    live: dict[str, torch.Tensor]


def trace(
    model: torch.nn.Module,
    metas: Sequence[TensorMeta],
    tied: Sequence[tuple[str, str]],
    device: str = "",
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None,
) -> Traced:
    """Run ``model.load_weights``, or `load`, on placeholders of `metas`.

    Parameters do not change, except for padding that the loader fills (of a vocabulary): it is filled after
    the proof.

    Args:
        device: see `RankLayout.device`.

    Raises:
        UnprovableError: the loader does more than copy parts, leaves a tensor out, or writes a
            parameter's byte twice or never; says which.
    """
    recorder = _Recorder(model)
    run: Callable[..., object] = load or model.load_weights  # type: ignore[assignment]
    try:
        with torch.no_grad(), recorder:
            run(recorder.placeholders(metas))
    except Exception as error:
        # A loader may raise anything on placeholders; it gets whole tensors instead.
        raise recorder.refusal or UnprovableError(f"{type(error).__name__}: {error}") from error
    if recorder.refusal:
        raise recorder.refusal
    traced = recorder.result(metas, tied, device)
    try:
        check_live("live", Layout.from_ranks([traced.layout]))
    except PlanError as error:
        raise UnprovableError(str(error)) from error
    with torch.no_grad():
        for view, value in recorder.fills:
            view.fill_(value)
    return traced


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records writes to a model's memory, and skips them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: UnprovableError | None = None
        self.fills: list[tuple[torch.Tensor, float]] = []
        self._params = {name for name, _ in model.named_parameters()}
        self._live = _by_storage(model)
        self._segments: list[Segment] = []
        self._dtypes: dict[str, str] = {}
        self._padding: list[tuple[str, int, int]] = []
        self._current: tuple[TensorMeta, torch.Tensor] | None = None

    def placeholders(self, metas: Sequence[TensorMeta]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one tensor at a time, of uninitialised memory that is not touched."""
        shapes = {meta.name: meta.shape for meta in metas}
        for meta in metas:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="cpu")
            self._current = meta, tensor
            yield from as_loaded(meta.name, tensor, shapes)
        self._current = None

    def result(self, metas: Sequence[TensorMeta], tied: Sequence[tuple[str, str]], device: str) -> Traced:
        segments = joined(self._segments)
        held = {segment.tensor for segment in segments}
        for meta in metas:
            if meta.name not in held and meta.nbytes:
                raise UnprovableError(f"its loader leaves out {meta.name}")
        # Registered buffers count only if the checkpoint has them: caches are not written.
        written = {segment.buffer for segment in segments} | {entry[0] for entry in self._padding}
        live = {name: t for name, t in self._live.values() if name in self._params or name in written}
        layout = RankLayout(
            tuple(replace(meta, dtype=self._dtypes.get(meta.name, meta.dtype)) for meta in metas),
            tuple(segments),
            tuple(tied),
            metas_of(live),
            tuple(self._padding),
            device,
        )
        return Traced(layout, live)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an OpOverload, and what it takes
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        try:
            if func is _ATEN.copy_.default and self._find(args[0]):
                return self._copy(args[0], args[1])
            if func in _FILLS and self._find(args[0]):
                return self._fill(args[0], args[1] if len(args) > 1 else 0)
            for tensor in _written(func, args, kwargs):
                self._refuse_write(func, tensor)
        except UnprovableError as error:
            self.refusal = self.refusal or error
            raise
        return func(*args, **kwargs)

    def _find(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Return the live tensor that `tensor` is a view of."""
        return self._live.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _is_placeholder(self, tensor: torch.Tensor) -> bool:
        held = self._current[1].untyped_storage().data_ptr() if self._current else None
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == held

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        found = self._find(target)
        assert found
        name, live = found
        if self._current is None or not self._is_placeholder(source):
            raise UnprovableError(f"{name}: its loader computes what it stores")
        meta, tensor = self._current
        held = meta_of(meta.name, live).dtype
        may_cast = {held, meta.dtype} <= CASTABLE
        if self._dtypes.setdefault(meta.name, held) != held or not (held == meta.dtype or may_cast):
            raise UnprovableError(f"{name} is {live.dtype}, {meta.name} is {meta.dtype}")
        if source.dtype != tensor.dtype or target.dtype != live.dtype:
            raise UnprovableError(f"{name}: its loader views bytes as another dtype")
        stored = replace(meta, dtype=held)
        self._segments.append(segment_of(stored, source, name, target, _offset(live, target)))
        return target

    def _fill(self, target: torch.Tensor, value: float) -> torch.Tensor:
        found = self._find(target)
        assert found
        name, live = found
        self._padding += [(name, *run) for run in padding_runs(target, _offset(live, target))]
        self.fills.append((target, value))
        return target

    def _refuse_write(self, func: object, tensor: torch.Tensor) -> None:
        if found := self._find(tensor):
            raise UnprovableError(f"{found[0]}: its loader runs {func} on it")
        if self._is_placeholder(tensor):
            raise UnprovableError(f"its loader runs {func} on what it is given")


def _by_storage(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Return parameters and registered buffers by the address of their memory, each once."""
    live: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise UnprovableError(f"{name} holds nothing: it was packed elsewhere")
        if not parameter.is_contiguous():
            raise UnprovableError(f"{name} is not contiguous")
        key = parameter.untyped_storage().data_ptr()
        other, known = live.setdefault(key, (name, parameter))
        if (known.data_ptr(), known.shape) != (parameter.data_ptr(), parameter.shape):
            raise UnprovableError(f"{name} and {other} share their memory")
    for name, buffer in model.named_buffers():
        if buffer.numel():
            live.setdefault(buffer.untyped_storage().data_ptr(), (name, buffer))
    return live


def _offset(live: torch.Tensor, view: torch.Tensor) -> int:
    """Return the bytes from a live tensor's first element to a view's."""
    return int(view.storage_offset() - live.storage_offset()) * live.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the tensors that an operator writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        yield from (each for each in values if isinstance(each, torch.Tensor))
