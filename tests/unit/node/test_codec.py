"""Values of the protocols' types arrive as they were, and other bytes are a WireError."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NewType, TypeVar, Union

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from tests.foreign import NASTY, foreign
from tests.unit.plan.plan_strategies import World, worlds
from weightsync.errors import DeadlineError, EngineError, SlowError, VerifyError, WeightSyncError, WireError
from weightsync.node.calls import methods_of
from weightsync.node.codec import decode, encode
from weightsync.plan import Plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.handles import BufferHandle, DeviceHandle, Handle, Offer
from weightsync.protocol.messages import (
    Attached,
    Exchange,
    FeedTicket,
    Forward,
    LiveDigest,
    LoadReport,
    Moved,
    Prepared,
    PublishReport,
    PublishTask,
    Read,
    Receive,
    Refilled,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
    UpdateTask,
)
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer
from weightsync.protocol.timing import Span

PEERS = (TrainerPeer, HolderPeer, EnginePeer)
KINDS: Mapping[str, Any] = {
    f"{peer.__name__}.{name}, {what}": kind
    for peer in PEERS
    for name, method in methods_of(peer).items()
    for what, kind in (("asked", method.args), ("answered", method.answer))
}

text = st.text(max_size=8)
numbers = st.integers(0, 1 << 40)
few, flags = st.frozensets(numbers, max_size=3), (st.booleans(), st.booleans())
seconds = st.floats(allow_nan=False)


def several(values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=most).map(tuple)


def by(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(keys, values, max_size=3)


def words(*shape: int) -> st.SearchStrategy[Any]:
    size = int(np.prod(shape))
    drawn = st.lists(st.integers(0, (1 << 64) - 1), min_size=size, max_size=size)
    return drawn.map(lambda each: np.array(each, np.uint64).reshape(shape))


spans = st.builds(Span, text, seconds, seconds)
buffers = st.builds(BufferHandle, numbers, numbers, text, numbers, st.booleans())
devices = st.builds(DeviceHandle, text, numbers, st.binary(max_size=8), numbers, numbers)
memory = by(text.filter(bool), devices).map(DeviceMemory.of)
offers = st.builds(
    Offer, holder=text, protocol=text, memory=buffers, endpoint=text, base=numbers, secret=text
)
tickets = st.builds(
    FeedTicket,
    text,
    text,
    text,
    st.binary(max_size=8),
    several(buffers | devices),
    st.none() | buffers,
    st.integers(-1, 9),
)
groups = several(st.integers(0, 9))
digests = st.none() | st.builds(LiveDigest, text, text)
headers = st.builds(SnapshotHeader, numbers, text, numbers)
parts = st.builds(SnapshotPart, headers, offers, words(3), digests)
snapshots = st.builds(
    Snapshot,
    numbers,
    text,
    by(numbers, several(offers)),
    st.booleans(),
    by(numbers, several(offers)),
    st.booleans(),
)
errors = st.builds(SlowError, text, st.lists(text, max_size=2).map(tuple), seconds)
reports = st.builds(
    PublishReport, words(3), words(3), by(text, numbers), several(spans), st.none() | words(3), several(text)
)
layouts = worlds().map(lambda world: LayoutTable.of(world.trainers[0].layout(world.tensors, world.tied)))
plans = worlds().map(World.plan)
dtypes = st.sampled_from(["?", "i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u8", "<f2", "<f4", ">f8"])
arrays = st.tuples(dtypes, st.sampled_from([(), (0,), (5,), (0, 3), (2, 3), (2, 0, 4)])).map(
    lambda each: np.arange(int(np.prod(each[1]))).reshape(each[1]).astype(each[0])
)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


Number = NewType("Number", int)


@dataclass(frozen=True)
class Tree:
    """Has a field of its own type."""

    value: Number
    below: tuple[Tree, ...] = ()
    color: Color = Color.RED


trees = st.recursive(
    st.builds(Tree, numbers), lambda each: st.builds(Tree, numbers, several(each), st.sampled_from(Color))
)
literals = st.sampled_from(["keep", "wait", None])
VALUES: Mapping[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "Plan": (Plan, plans),
    "LayoutTable": (LayoutTable, layouts),
    "DeviceMemory": (DeviceMemory, memory),
    "handles": (tuple[Handle, ...], several(buffers | devices)),
    "handles, named the other way": (tuple[DeviceHandle | BufferHandle, ...], several(buffers | devices)),
    "Prepared": (
        Prepared,
        st.builds(Prepared, text, st.none() | buffers, st.none() | tickets, by(groups, text)),
    ),
    "Attached": (
        Attached,
        st.builds(Attached, text, st.none() | memory, st.none(), st.booleans()),
    ),
    "LoadReport": (
        LoadReport,
        st.builds(
            LoadReport,
            words(2, 3) | words(0, 3),
            several(several(spans)),
            several(digests),
            *[st.booleans()] * 4,
        ),
    ),
    "PublishReport": (PublishReport, reports),
    "PublishTask": (PublishTask, st.builds(PublishTask, st.booleans(), groups)),
    "UpdateTask": (
        UpdateTask,
        st.builds(Receive, st.none(), *flags)
        | st.builds(Forward, st.none() | few, *flags)
        | st.builds(Read, st.none() | few, *flags, few),
    ),
    "Moved": (Moved, st.builds(Moved, spans, seconds, st.none() | errors)),
    "Exchange": (
        Exchange,
        st.builds(Exchange, text, *[by(numbers, st.binary(max_size=8))] * 2),
    ),
    "Snapshot": (Snapshot, snapshots),
    "StageTask": (
        StageTask,
        st.builds(
            StageTask, st.none() | headers, several(parts), words(3), st.booleans(), st.none() | snapshots
        ),
    ),
    "StagingMemory": (
        StagingMemory,
        st.builds(StagingMemory, by(numbers, several(offers)), st.booleans(), text),
    ),
    "StagedPart": (
        StagedPart,
        st.builds(StagedPart, numbers, offers, st.none() | words(3), text, numbers, several(spans)),
    ),
    "Refilled": (
        Refilled,
        st.builds(Refilled, by(text, numbers), by(text, text), seconds, several(text)),
    ),
    "an array": (npt.NDArray[Any], arrays),
    "an array or none": (npt.NDArray[Any] | None, st.none() | arrays),
    "mappings": (Mapping[tuple[int, str], dict[int, str]], by(st.tuples(numbers, text), by(numbers, text))),
    "an optional": (Union[int, None], st.none() | st.integers(-(1 << 63), (1 << 64) - 1)),  # noqa: UP007
    "a literal": (Literal["keep", "wait"] | None, literals),
    "plain values": (
        tuple[bool, int, float, str, bytes, None],
        st.tuples(st.booleans(), numbers, seconds | numbers, text, st.binary(max_size=8), st.none()),
    ),
    "sequences": (
        tuple[Sequence[int], list[str], Collection[float]],
        st.tuples(several(numbers), several(text), several(seconds)),
    ),
    "sets": (
        tuple[frozenset[int], set[str]],
        st.tuples(st.frozensets(numbers, max_size=3), st.frozensets(text, max_size=3)),
    ),
    "a tree": (Tree, trees),
}


def assert_equal(came: Any, sent: Any) -> None:
    """Compare field by field: arrays, and classes that compare by identity, have no equality of their own."""
    assert type(came) is type(sent)
    if isinstance(sent, np.ndarray):
        assert came.dtype == sent.dtype.newbyteorder("<")
        np.testing.assert_array_equal(came, sent)
    elif isinstance(sent, WeightSyncError):
        assert (came.args, came.where) == (sent.args, sent.where)
    elif isinstance(sent, tuple | list):
        assert len(came) == len(sent)
        for ours, theirs in zip(came, sent, strict=True):
            assert_equal(ours, theirs)
    elif isinstance(sent, dict):
        assert came.keys() == sent.keys()
        for key, value in sent.items():
            assert_equal(came[key], value)
    elif dataclasses.is_dataclass(sent):
        for each in dataclasses.fields(sent):
            assert_equal(getattr(came, each.name), getattr(sent, each.name))
    elif isinstance(sent, msgspec.Struct):
        for name in sent.__struct_fields__:
            assert_equal(getattr(came, name), getattr(sent, name))
    else:
        assert came == sent


@pytest.mark.parametrize("name", VALUES)
@given(drawn=st.data())
def test_a_value_arrives_as_it_was(name: str, drawn: st.DataObject) -> None:
    kind, values = VALUES[name]
    sent = drawn.draw(values)
    assert_equal(decode(encode(sent, kind), kind), sent)


@given(plans)
def test_a_plan_that_arrived_has_the_same_digest(plan: Plan) -> None:
    assert decode(encode(plan, Plan), Plan).digest() == plan.digest()


@pytest.mark.parametrize("peer", PEERS)
def test_every_method_of_a_peer_can_be_called(peer: type) -> None:
    """Types without a codec raise a TypeError, bytes of another value a WireError."""
    methods = methods_of(peer)
    public = {name for name, each in vars(peer).items() if callable(each) and not name.startswith("_")}
    assert public - {"ask_readable"} == methods.keys()
    for name, method in methods.items():
        for kind in (*typing.get_args(method.args), method.answer):
            check_codec(kind, f"{peer.__name__}.{name}")


def check_codec(kind: Any, where: str) -> None:
    said = ""
    try:
        decode(b"\xc0", kind)
    except WireError as error:
        said = str(error)
    assert "has no codec" not in said, where
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"):
        for each in typing.get_type_hints(kind).values():
            if typing.get_origin(each) is not typing.ClassVar:
                check_codec(each, where)
    if typing.get_origin(kind) not in (np.ndarray, Literal):
        for each in typing.get_args(kind):
            check_codec(each, where) if each is not ... else None


def test_a_type_without_a_codec_is_refused() -> None:
    for kind in (complex, list, tuple[complex, int], dict[str, type]):
        with pytest.raises(TypeError, match="has no codec"):
            encode((), kind)


@dataclass(frozen=True)
class First:
    value: int = 1


@dataclass(frozen=True)
class Second:
    value: int = 2


@dataclass(frozen=True)
class Third:
    value: int = 3


def test_a_union_is_sent_alike_in_whatever_order_it_is_written() -> None:
    """Equal types share a codec: the first that a process meets must not decide the numbers."""
    assert Second | First == First | Second
    assert encode(First(), Second | First) == encode(First(), First | Third)
    assert decode(encode(Second(), Second | First), First | Second) == Second()


@pytest.mark.parametrize(
    "error",
    [
        EngineError("e0", "move", "no memory", 1),
        DeadlineError("move", ("holder 0",), 2.5),
        VerifyError("e0", 3, ("a", "b")),
    ],
)
def test_an_error_arrives_as_it_was(error: WeightSyncError) -> None:
    came = decode(encode(error, WeightSyncError), WeightSyncError)
    assert type(came) is type(error)
    assert str(came) == str(error)
    with pytest.raises(WireError, match=r"is no SlowError"):
        decode(encode(error, WeightSyncError), SlowError)


@pytest.mark.parametrize(
    ("value", "kind", "other"),
    [
        (3, int, str),
        (True, bool, int),
        (3, int, bool),
        (1.5, float, int),
        ("a", str, Literal["b", "c"]),
        ("green", str, Color),
        ((1, 2), tuple[int, int], tuple[int]),
        ((1, 2), tuple[int, int], tuple[int, int, int]),
        ((1, "a"), tuple[int, str], tuple[int, ...]),
        (Span("load", 1.0, 2.0), Span, PublishTask),
        (b"12345678", bytes, npt.NDArray[Any]),
        ((2, None), tuple[int, None], BufferHandle | None),
    ],
)
def test_a_value_of_another_type_is_a_wire_error(value: object, kind: Any, other: Any) -> None:
    with pytest.raises(WireError, match="not a value of ours"):
        decode(encode(value, kind), other)


@pytest.mark.parametrize("dtype", ["O", "|O8", "V8", "<U4", "S4", "<M8[s]", "f4,O", [["a", "O"]], 8])
def test_an_array_has_numbers(dtype: object) -> None:
    for shape in ([1], [0], []):
        with pytest.raises(WireError):
            decode(msgspec.msgpack.encode((dtype, shape, b"12345678")), npt.NDArray[Any])


@pytest.mark.parametrize("shape", [[3], [2, 2], [1 << 62, 1 << 62], ["1"], [1.0], 3.5, "x"])
def test_an_array_has_the_bytes_of_its_shape(shape: object) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(("<u8", shape, b"12345678")), npt.NDArray[Any])


def test_an_array_that_arrived_cannot_be_written() -> None:
    came = decode(encode(np.arange(3), npt.NDArray[Any]), npt.NDArray[Any])
    with pytest.raises(ValueError, match="read-only"):
        came[0] = 1


def no_objects(value: object) -> None:
    if isinstance(value, np.ndarray):
        assert value.dtype.kind in "biuf"
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            no_objects(each)
    elif isinstance(value, dict):
        no_objects((*value.keys(), *value.values()))
    elif dataclasses.is_dataclass(value):
        no_objects([getattr(value, each.name) for each in dataclasses.fields(value)])
    elif isinstance(value, msgspec.Struct):
        no_objects([getattr(value, name) for name in value.__struct_fields__])


def check(data: bytes, kind: Any) -> None:
    with contextlib.suppress(WireError):
        no_objects(decode(data, kind))


@pytest.mark.parametrize("name", [*VALUES, *KINDS])
def test_nasty_bytes_are_a_value_or_a_wire_error(name: str) -> None:
    kind = KINDS[name] if name in KINDS else VALUES[name][0]
    for data in NASTY.values():
        check(data, kind)
        check(b"\x91" + data, kind)


@given(st.sampled_from([*KINDS.values()]), foreign([b"\x90", b"\x91\xc0", b"\x92\x01\x02"]))
@settings(max_examples=300)
def test_any_bytes_in_place_of_a_call_are_a_value_or_a_wire_error(kind: Any, data: bytes) -> None:
    check(data, kind)


@pytest.mark.parametrize("name", VALUES)
@given(drawn=st.data())
def test_any_bytes_are_a_value_or_a_wire_error(name: str, drawn: st.DataObject) -> None:
    kind, values = VALUES[name]
    check(drawn.draw(foreign([encode(drawn.draw(values), kind)])), kind)


def test_arrays_may_be_annotated_by_an_alias_of_their_type() -> None:
    """From NumPy 2.5 on, `numpy.typing.NDArray` is such an alias."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    value = np.arange(4, dtype=np.int16)
    for kind in (alias[np.int16], Union[alias[np.int16], None]):  # noqa: UP007 - as in an alias
        assert (decode(encode(value, kind), kind) == value).all()
