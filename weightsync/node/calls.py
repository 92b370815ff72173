"""The methods of a peer protocol, with the types that travel."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsync.errors import WireError
from weightsync.node.codec import decode, encode
from weightsync.plan import Plan
from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms
from weightsync.plan.direct.alike import Alike
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.peers import SharedAlike, SharedLayout, SharedPlan, SharedTable, SharedTerms

_SHARED: Mapping[object, type] = {
    SharedPlan: Plan,
    SharedTerms: CrossHostTerms,
    SharedTable: BundleTable,
    SharedAlike: Alike,
    SharedLayout: LayoutTable,
}


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a peer.

    Attributes:
        args: the type of the arguments, a tuple.
        defaults: the values of the last arguments, if they are left out.
        answer: the type of the answer.
        tells: the last argument is a future, which the process resolves while it answers.
    """

    args: Any
    defaults: tuple[object, ...]
    answer: Any
    tells: bool

    def encoded(self, args: tuple[object, ...]) -> bytes:
        """Return the arguments as bytes, without a future. Raises TypeError for too few."""
        num_args = len(typing.get_args(self.args))
        left_out = num_args - len(args)
        if left_out > len(self.defaults):
            raise TypeError(f"{len(args)} arguments in place of {num_args}")
        given = args + self.defaults[len(self.defaults) - left_out :] if left_out else args
        return encode(given, self.args)

    def decoded(self, data: bytes) -> tuple[object, ...]:
        """Return the arguments. Raises WireError for other bytes."""
        args: tuple[object, ...] = decode(data, self.args)
        return args


@functools.cache
def methods_of(protocol: type) -> Mapping[str, Method]:
    """Return the coroutine methods of a peer protocol by name, such as those of `HolderPeer`."""
    found = inspect.getmembers(protocol, inspect.iscoroutinefunction)
    return {name: _method(each) for name, each in found if not name.startswith("_")}


def _method(function: Any) -> Method:  # noqa: ANN401 - a coroutine function of a protocol
    hints = typing.get_type_hints(function)
    answer = hints.pop("return")
    parameters = [each for name, each in inspect.signature(function).parameters.items() if name != "self"]
    kinds = [_sent(hints[each.name]) for each in parameters]
    tells = bool(kinds) and typing.get_origin(kinds[-1]) is asyncio.Future
    if tells:
        kinds, parameters = kinds[:-1], parameters[:-1]
    defaults = tuple(each.default for each in parameters if each.default is not inspect.Parameter.empty)
    return Method(types.GenericAlias(tuple, tuple(kinds)), defaults, answer, tells)


def _sent(kind: Any) -> Any:  # noqa: ANN401 - an annotation
    """Return `kind` with the types that shared values have where they arrive."""
    if kind in _SHARED:
        return _SHARED[kind]
    if any(each in _SHARED for each in typing.get_args(kind)):
        return typing.Union[tuple(map(_sent, typing.get_args(kind)))]  # noqa: UP007 - made of a list
    return kind


def known(methods: Mapping[str, Method], name: str) -> Method:
    """Return the method of this name. Raises WireError if there is none."""
    if name not in methods:
        raise WireError(f"{name[:40]!r} is no method that can be called here")
    return methods[name]
