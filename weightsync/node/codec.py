"""Encodes values by their annotated types, as MessagePack. Nothing is unpickled."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from weightsync.channel.wire import SentError
from weightsync.errors import WeightSyncError
from weightsync.protocol.decoding import decoded

_PLAIN = (bool, int, float, str, bytes, type(None))
_NUMBERS = "biuf"
"""Kinds of dtypes of arrays, as of `numpy.dtype.kind`."""


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one type are packed into values that MessagePack has, and unpacked."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def encode(value: object, kind: Any) -> bytes:  # noqa: ANN401 - an annotation
    """Return `value`, of type `kind`, as bytes."""
    return msgspec.msgpack.encode(_codec(kind).pack(value))


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:  # noqa: ANN401
    """Return the value of type `kind` that `encode` made bytes of.

    Sequences come as tuples, mappings as dicts, and arrays read-only. Raises WireError for other bytes.
    """
    return decoded(lambda raw: _codec(kind).unpack(msgspec.msgpack.decode(raw)), data, "a value of ours")


@functools.cache
def _codec(kind: Any) -> _Codec:  # noqa: ANN401 - one branch for each kind of type
    """Return the codec of a type. Raises TypeError for a type that has none."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if aliased := getattr(origin, "__value__", None):  # such as NDArray from NumPy 2.5 on
        return _codec(aliased[args])
    if isinstance(kind, typing.NewType):
        return _codec(kind.__supertype__)
    if kind in _PLAIN or kind is None:
        return _plain(types.NoneType if kind is None else kind)
    if kind in (object, Any):
        return _Codec(lambda value: value, lambda value: value)
    if origin is typing.Literal:
        return _plain(*{type(each) for each in args}, only=args)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is np.ndarray or kind is np.ndarray:
        return _Codec(_pack_array, _unpack_array)
    if origin is tuple and args[-1:] != (...,):
        return _fields(tuple, [_codec(each) for each in args])
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Collection):
        return _sequence(_codec(args[0]), tuple)
    if origin in (set, frozenset):
        return _sequence(_codec(args[0]), frozenset)
    if origin in (dict, collections.abc.Mapping):
        return _mapping(*map(_codec, args))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Codec(lambda value: value.value, kind)
    if isinstance(kind, type) and issubclass(kind, WeightSyncError):
        return _error(kind)
    if isinstance(kind, type) and (names := _names(kind)) is not None:
        return _record(kind, names)
    raise TypeError(f"{kind} has no codec")


def _plain(*kinds: type, only: Sequence[object] = ()) -> _Codec:
    wanted = (*kinds, int) if float in kinds else kinds

    def check(value: object) -> object:
        if type(value) not in wanted or (only and value not in only):
            raise ValueError(f"{value!r} is no {' or '.join(each.__name__ for each in kinds)}")
        return value

    return _Codec(lambda value: value, check)


def _union(kinds: Sequence[Any]) -> _Codec:
    """Return the codec of a union: the number of the member, and the member's value.

    Unions of the same members are equal, and share a codec: their order must not count.
    """
    kinds = sorted(kinds, key=str)
    codecs = [_codec(each) for each in kinds]
    bases = [_base(each) for each in kinds]

    def pack(value: object) -> Any:  # noqa: ANN401
        number = next(i for i, base in enumerate(bases) if isinstance(value, base))
        return number, codecs[number].pack(value)

    def unpack(packed: tuple[int, Any]) -> object:
        number, value = packed
        return codecs[number].unpack(value)

    return _Codec(pack, unpack)


def _base(kind: Any) -> type:  # noqa: ANN401
    if kind is None:
        return types.NoneType
    if typing.get_origin(kind) is typing.Literal:
        return type(typing.get_args(kind)[0])
    base: type = typing.get_origin(kind) or kind
    aliased = getattr(base, "__value__", None)
    return _base(aliased) if aliased else base


def _pack_array(array: np.ndarray[Any, Any]) -> tuple[str, Sequence[int], bytes]:
    dtype = array.dtype.newbyteorder("<")
    return dtype.str, array.shape, array.astype(dtype, copy=False).tobytes()


def _unpack_array(packed: tuple[str, Sequence[int], bytes]) -> np.ndarray[Any, Any]:
    name, shape, data = packed
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"an array of {name}")
    return np.frombuffer(data, dtype).reshape(shape)


def _fields(make: Callable[[Any], Any], codecs: Sequence[_Codec]) -> _Codec:
    def pack(values: Sequence[object]) -> list[Any]:
        return [codec.pack(value) for codec, value in zip(codecs, values, strict=True)]

    def unpack(packed: Sequence[Any]) -> Any:  # noqa: ANN401
        return make(codec.unpack(value) for codec, value in zip(codecs, packed, strict=True))

    return _Codec(pack, unpack)


def _sequence(item: _Codec, make: Callable[[Any], Any]) -> _Codec:
    return _Codec(
        lambda values: [item.pack(each) for each in values],
        lambda packed: make(item.unpack(each) for each in packed),
    )


def _mapping(key: _Codec, value: _Codec) -> _Codec:
    """Return the codec of a mapping: a list of pairs, since keys may be any type."""

    def pack(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return [(key.pack(each), value.pack(its)) for each, its in values.items()]

    return _Codec(pack, lambda packed: {key.unpack(each): value.unpack(its) for each, its in packed})


def _error(kind: type[WeightSyncError]) -> _Codec:
    sent = _codec(SentError)

    def unpack(packed: Any) -> WeightSyncError:  # noqa: ANN401
        error: WeightSyncError = sent.unpack(packed).rebuild()
        if not isinstance(error, kind):
            raise TypeError(f"{type(error).__name__} is no {kind.__name__}")
        return error

    return _Codec(lambda error: sent.pack(SentError.of(error)), unpack)


def _names(kind: type) -> Sequence[str] | None:
    """Return the fields of a dataclass, a struct or a named tuple; None of another class."""
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind) if each.init]
    return getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)


def _record(kind: type, names: Sequence[str]) -> _Codec:
    hints = typing.get_type_hints(kind)
    fields: list[_Codec] = []

    def known() -> list[_Codec]:  # on use: a class may have fields of its own type
        fields[:] = fields or [_codec(hints[name]) for name in names]
        return fields

    def pack(value: object) -> list[Any]:
        return [codec.pack(getattr(value, name)) for codec, name in zip(known(), names, strict=True)]

    def unpack(packed: Sequence[Any]) -> Any:  # noqa: ANN401
        values = [codec.unpack(value) for codec, value in zip(known(), packed, strict=True)]
        return kind(**dict(zip(names, values, strict=True)))

    return _Codec(pack, unpack)
