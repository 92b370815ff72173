"""Finds where a reload puts each tensor of a quantised checkpoint, without changing weights.

vLLM reloads a module at a time: it fills new parameters, processes them for its kernels, and copies them into
the live ones. A dispatch mode sees both copies, and skips them. SGLang's loader copies into the live
parameters at once. If processing changes no byte, as for FP8 on Hopper GPUs, the two copies show where each
element of the checkpoint lives. Any other treatment of these bytes, such as packing for Marlin kernels, is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.engines.loading.loader_trace import UnprovableError, joined, padding_runs, segment_of
from weightsync.engines.loading.whole_sink import Loader
from weightsync.errors import PlanError
from weightsync.memory.tensors import extent_nbytes, metas_of
from weightsync.plan import Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.segment import CASTABLE

_ATEN = torch.ops.aten
_FILLS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)
_READ_NOTHING = frozenset(
    f"aten::{name}" for name in ("empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros")
)


@dataclass(frozen=True, slots=True)
class Reload:
    """The effects of a reload on live parameters.

    Attributes:
        segments: where the reload puts tensors, in the dtypes of live parameters, to which the loader casts.
        fills: the padding that the reload fills in place: the name of the parameter, a view, and the value.
    """

    segments: tuple[Segment, ...]
    fills: Sequence[tuple[str, torch.Tensor, float]]


def trace_reload(
    model: torch.nn.Module,
    live: Mapping[str, torch.Tensor],
    stored: Sequence[TensorMeta],
    make_loader: Callable[[], Loader],
) -> Reload:
    """Return the effects of a reload of `stored` on `live`, by placeholders, without changing `live`.

    Args:
        live: parameters whose bytes must all come from `stored`, by name.
        make_loader: begins a reload of `model`.

    Raises:
        UnprovableError: the reload does more than copy, or does not write a byte of `live`; says where.
    """
    recorder = _Recorder(model, live)
    loader = make_loader()
    try:
        with torch.no_grad(), recorder:
            loader.load(recorder.placeholders(stored))
            loader.finish()
    except Exception as error:
        loader.abandon()  # outside of the recorder: it puts live parameters back, and copies nothing
        raise recorder.refusal or UnprovableError(f"{type(error).__name__}: {error}") from error
    if recorder.refusal:
        raise recorder.refusal
    return Reload(recorder.proven(), recorder.fills)


@dataclass(slots=True)
class _Filled:
    """New memory that a reload filled: segments and padding, by bytes from the start of the storage."""

    segments: list[Segment] = field(default_factory=list)
    padding: list[tuple[int, int]] = field(default_factory=list)

    def moved(self, source: torch.Tensor, start: int) -> _Filled:
        """Return the content of `source`, a dense view of this memory, moved to byte `start` of other memory.

        Parts outside the view are left out: they leave gaps in the live parameters, or exceed them.
        """
        first, end = _start(source), _start(source) + extent_nbytes(source)
        shift = start - first
        return _Filled(
            [
                replace(s, byte_offset=s.byte_offset + shift)
                for s in self.segments
                if first <= s.byte_offset < end
            ],
            [(at + shift, nbytes) for at, nbytes in self.padding if first <= at < end],
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Follows placeholders into new memory, and from there into live parameters.

    Attributes:
        refusal: the first operation that was more than a copy. The reload continues, so that it ends
            normally.
        fills: see `Reload`.
    """

    def __init__(self, model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: UnprovableError | None = None
        self.fills: list[tuple[str, torch.Tensor, float]] = []
        self._live: dict[int, str] = {}
        for name, each in live.items():
            if each.numel():
                self._live.setdefault(_storage(each), name)  # an output head may be tied to the embedding
        self._wanted = {name: live[name] for name in self._live.values()}
        tensors = (*model.parameters(), *model.buffers())
        self._untouchable = {_storage(each) for each in tensors if each.numel()}
        self._placeholders: dict[int, tuple[TensorMeta, torch.Tensor]] = {}
        self._filled: dict[int, _Filled] = {}
        self._metas: dict[str, TensorMeta] = {}
        self._segments: list[Segment] = []
        self._padding: list[tuple[str, int, int]] = []

    def placeholders(self, stored: Sequence[TensorMeta]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a placeholder for each of `stored`, in host memory that nobody touches."""
        for meta in stored:
            tensor = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="cpu")
            if tensor.numel():
                self._placeholders[_storage(tensor)] = meta, tensor
            yield meta.name, tensor

    def proven(self) -> tuple[Segment, ...]:
        """Return the segments, after the proof that they fill each live byte once."""
        # Tensors without new memory are loaded twice, since vLLM counts elements by loading.
        segments = tuple(joined(dict.fromkeys(self._segments)))
        buffers = metas_of(self._wanted)
        padding = tuple(dict.fromkeys(self._padding))
        layout = RankLayout(tuple(self._metas.values()), segments, (), buffers, padding)
        try:
            check_live("live", Layout.from_ranks([layout]))
        except PlanError as error:
            raise UnprovableError(str(error)) from error
        return segments

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an OpOverload, and what it takes
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        is_copy = func is _ATEN.copy_.default
        if is_copy and args[0].is_meta:
            return func(*args, **(kwargs or {}))  # vLLM counts elements by it
        if is_copy and self._takes(args[0], args[1]):
            return args[0]
        if func in _FILLS and (key := _storage(args[0])) in self._filled.keys() | self._untouchable:
            return self._fill_live(*args) if key in self._untouchable else self._fill(func, args)
        given = {_storage(each): each for each in tree_leaves((args, kwargs)) if _is_real(each)}
        outcome = func(*args, **(kwargs or {}))
        if func is _ATEN.clone.default and self._clone(args[0], outcome):
            return outcome
        self._check(func, given)
        for each in tree_leaves(outcome):
            if _is_real(each) and _storage(each) not in given:
                self._filled.pop(_storage(each), None)  # new memory, where other tensors have been
        return outcome

    def _takes(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Follow a copy. Returns whether it must not be made."""
        if not target.numel():
            return False
        key = _storage(target)
        if placeholder := self._placeholders.get(_storage(source)):
            self._put(placeholder[0], source, target)
            return True
        if key in self._untouchable:
            if key in self._live and (filled := self._filled.get(_storage(source))):
                self._make_live(filled, source, target)
            return True
        return key == _storage(source) and _place(target) == _place(source)

    def _put(self, meta: TensorMeta, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that a part of a placeholder is copied into new memory, or at once into a live parameter."""
        held = replace(meta, dtype=str(target.dtype).removeprefix("torch."))
        may_cast = {held.dtype, meta.dtype} <= CASTABLE
        if held != self._metas.setdefault(meta.name, held) or not (held == meta or may_cast):
            self._refuse(f"its loader stores {meta.name}, {meta.dtype}, as {held.dtype}")
            return
        key = _storage(target)
        name = self._live.get(key, "")
        if key in self._untouchable and not name:
            self._refuse(f"its loader writes {meta.name}, which is no parameter")
            return
        start = _start(target) - (_start(self._wanted[name]) if name else 0)
        segments = self._segments if name else self._filled.setdefault(key, _Filled()).segments
        try:
            segments.append(segment_of(held, source, name, target, start))
        except UnprovableError as error:
            self._refuse(f"{meta.name}: {error}")

    def _clone(self, source: torch.Tensor, made: torch.Tensor) -> bool:
        """Follow a copy into memory of the same form. Returns whether it is one."""
        filled = self._filled.get(_storage(source))
        if filled is None or _form(source) != _form(made) or not _is_dense(source):
            return False
        self._filled[_storage(made)] = filled.moved(source, _start(made))
        return True

    def _fill(self, func: Any, args: tuple[Any, ...]) -> Any:  # noqa: ANN401 - an OpOverload, its outcome
        """Fill padding in new memory, and note it."""
        target = args[0]
        runs = padding_runs(target, _start(target))
        self._filled[_storage(target)].padding.extend(runs)
        return func(*args)

    def _fill_live(self, target: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Note padding that is filled where it lives, and fill nothing."""
        name = self._live.get(_storage(target), "")
        # A rank without padding fills no rows, and a fill of all rows is no padding.
        if name and 0 < target.numel() < self._wanted[name].numel():
            runs = padding_runs(target, _start(target) - _start(self._wanted[name]))
            self._padding += [(name, *run) for run in runs]
            self.fills.append((name, target, value))
        return target

    def _make_live(self, filled: _Filled, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note that processed memory becomes live."""
        name = self._live[_storage(target)]
        if _form(source) != _form(target) or not _is_dense(source):
            self._refuse(f"{name}: its loader puts it in another order")
            return
        moved = filled.moved(source, _start(target) - _start(self._wanted[name]))
        self._segments += [replace(each, buffer=name) for each in moved.segments]
        self._padding += [(name, at, nbytes) for at, nbytes in moved.padding]

    def _check(self, func: Any, given: Mapping[int, torch.Tensor]) -> None:  # noqa: ANN401 - an OpOverload
        """Refuse an operator that reads or changes bytes of a checkpoint."""
        used = [key for key in given if key in self._filled or key in self._placeholders]
        if used and not func.is_view and func._schema.name not in _READ_NOTHING:
            placeholder = self._placeholders.get(used[0])
            filled = self._filled.get(used[0])
            name = placeholder[0].name if placeholder else filled.segments[0].tensor if filled else ""
            self._refuse(f"its loader runs {func} on {name}")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or UnprovableError(reason)


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _start(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of a tensor's storage to the first element."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), *_form(tensor)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return dtype, shape and the strides that matter."""
    strides = (step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.dtype, tensor.shape, tuple(strides)


def _is_dense(tensor: torch.Tensor) -> bool:
    return extent_nbytes(tensor) == tensor.numel() * tensor.element_size()
