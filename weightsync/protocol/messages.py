"""Messages between the driver, holders, trainers and engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import SlowError
from weightsync.plan import Plan
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory
from weightsync.protocol.handles import BufferHandle, Handle, Offer
from weightsync.protocol.timing import Span

Group = tuple[int, ...]
"""The holders of one communicator, ascending. A holder's rank is its index in the tuple."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Resources of a holder that are ready for one membership epoch.

    Attributes:
        plan_digest: the plan's digest, as this holder computed it.
        send_buffer: the buffer to which the trainer rank publishes. None without a trainer rank, and if the
            rank's memory is read in place.
        ticket: the ticket for the holder's engine rank, if there is one.
        offers: the rendezvous of each communicator in which this holder is the first rank, by members.
    """

    plan_digest: str
    send_buffer: BufferHandle | None
    ticket: FeedTicket | None
    offers: Mapping[Group, str]


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank's answer to `attach`: the rank's memory, if the holder accesses it.

    The layout is left out: the driver has it.

    Attributes:
        plan_digest: the plan's digest, as the rank computed it.
        export: memory that holds the plan's tensors.
        live: memory that holds the rank's conversion of them.
        casts: the rank casts tensors that are sent in other dtypes than the layout's.
    """

    plan_digest: str
    export: DeviceMemory | None
    live: LiveMemory | None = None
    casts: bool = False

    def known_by(self, names: dict[bytes, bytes]) -> Attached:
        """Return the same with names of exported buffers as in `DeviceMemory.known_by`."""
        assert self.export
        return replace(self, export=self.export.known_by(names))


class _Task(msgspec.Struct, frozen=True):
    """The part of one holder in an update.

    Attributes:
        sent: the buckets that are broadcast; None for all, since not all engines read directly.
        exchanges: the holder takes part in the cross-host exchange.
        frozen: frozen tensors move, too. If not, the engines have them.
    """

    sent: frozenset[int] | None = None
    exchanges: bool = False
    frozen: bool = True

    def buckets(self, plan: Plan) -> Sequence[int]:
        """Return the buckets that are broadcast, in order."""
        moved = range(plan.num_buckets if self.frozen else plan.num_changing_buckets)
        return moved if self.sent is None else sorted(self.sent.intersection(moved))


class Forward(_Task, frozen=True, tag="forward"):
    """The holder moves bytes for other holders. The engine rank takes no part, or there is none."""


class Receive(_Task, frozen=True, tag="receive"):
    """The engine rank gets every bucket."""


class Read(_Task, frozen=True, tag="read"):
    """The holder copies the engine rank's part from the trainers' memory.

    Attributes:
        cast: buckets that are broadcast to engines which read directly, too, since a dtype differs.
    """

    cast: frozenset[int] = frozenset()


UpdateTask: TypeAlias = Forward | Receive | Read
"""The part of one holder in an update, by the way in which its engine rank gets the weights."""


class Moved(msgspec.Struct, frozen=True):
    """Outcome of one update on a holder.

    Attributes:
        span: when the move began, and its duration.
        waited_s: seconds spent waiting only for the engine rank.
        slow: why the engine rank was given up, if it did not keep up.
    """

    span: Span
    waited_s: float = 0.0
    slow: SlowError | None = None


class FeedTicket(msgspec.Struct, frozen=True):
    """Everything that an engine rank needs to reach the holder. Carries a secret: do not log it.

    `slots` are the bucket buffers. `send_buffer` is set if the holder has a send buffer for trainer rank
    `trainer`: pieces of that trainer are read from it, not from a slot.
    """

    holder: str
    engine: str
    endpoint: str
    secret: bytes
    slots: tuple[Handle, ...]
    send_buffer: BufferHandle | None
    trainer: int

    def __repr__(self) -> str:
        return f"FeedTicket(holder={self.holder!r}, engine={self.engine!r})"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A holder's answer to `exchange`, after planning messages and allocating memory for them.

    Attributes:
        rendezvous: the communicator's rendezvous, from the first rank; "" from other ranks.
        sent, received: digests of the messages by the other rank, see `ShufflePlan.digests`.
    """

    rendezvous: str
    sent: Mapping[int, bytes]
    received: Mapping[int, bytes]


class SnapshotHeader(msgspec.Struct, frozen=True):
    """Version, layout and part number of a snapshot, see `Snapshot`.

    base: the version that must be there already, if the memory holds a delta and no snapshot.
    """

    version: int
    layout: str
    part: int
    base: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A snapshot of one part, its offer, and the fingerprint of the whole version.

    Attributes:
        live: the digest of the part, if the part is a copy of parameters that an engine's loader made.
    """

    header: SnapshotHeader
    offer: Offer
    expected: Fingerprint
    live: LiveDigest | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of a part since version `base`, in a holder's memory.

    Attributes:
        base: the committed version with which the part was compared.
        offer: the offer of the memory; None if the delta is not shorter than the part, and is not kept.
        nbytes: the bytes of the delta.
        seconds: the seconds to find and to save the changes.
    """

    base: int
    offer: Offer | None
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class StageTask:
    """The staging work of one holder for a version.

    Attributes:
        save: the part that the holder's trainer rank published, if the holder stages it.
        copies: parts to copy from other holders.
        expected: the fingerprint of the whole version.
        digests: engines on the holder's host load the parts, so they are digested.
        to_device: the engine rank's tensors of this version, staged on the host, are copied to the rank's
            GPU.
        delta: a delta of the saved part is made, since the committed version.
        deltas: deltas of `copies` by part, for a holder that has their base.
    """

    save: SnapshotHeader | None
    copies: Sequence[SnapshotPart]
    expected: Fingerprint
    digests: bool
    to_device: Snapshot | None = None
    delta: bool = False
    deltas: Mapping[int, Delta] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagingMemory:
    """The memory that a holder has allocated for staging.

    Attributes:
        offers: the offers of each part's memory, for both versions.
        has_second_copy: whether the engine rank's GPU has memory for one more version.
        shortage: why it has not, if memory is the reason.
    """

    offers: Mapping[int, Sequence[Offer]]
    has_second_copy: bool
    shortage: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """A part of the next version in a holder's spare memory.

    Attributes:
        part: the part's number.
        offer: the offer of the part.
        fingerprint: the fingerprint of the bytes there; None if they were not digested.
        way: how the part was copied from another holder, "" if it was saved here.
        nbytes: the bytes that were copied.
        spans: when the holder began to ``save`` the part and make its ``delta``, or to ``copy`` it, and to
            ``digest`` it, and the durations.
        delta: the changes of the saved part, if the task asked for a delta and a committed version is there.
    """

    part: int
    offer: Offer
    fingerprint: Fingerprint | None
    way: str = ""
    nbytes: int = 0
    spans: Sequence[Span] = ()
    delta: Delta | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed version, and where each of its parts can be read.

    Attributes:
        layout: `Plan.content` if a part is one trainer rank's published weights, `flat_layout` if a part is
            the `FlatSnapshot` of one engine rank.
        parts: offers by part number, from holders that copied the part, that replicated it, and that let
            their engine rank's live memory be read.
        is_flat: whether parts are flat snapshots.
        reserve: offers of parts on other hosts, read only if all of `parts` are lost.
        on_device: the holder has also copied this version to the engine rank's GPU.
    """

    version: int
    layout: str
    parts: Mapping[int, Sequence[Offer]]
    is_flat: bool = False
    reserve: Mapping[int, Sequence[Offer]] = field(default_factory=dict)
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class Refilled:
    """A refill's bytes by holder, the ways of reading, and seconds.

    Attributes:
        left: holders that could not be read and were replaced by other holders.
    """

    bytes_from: Mapping[str, int]
    ways: Mapping[str, str]
    seconds: float
    left: tuple[str, ...] = ()

    @classmethod
    def together(cls, parts: Sequence[Refilled]) -> Refilled:
        """Add up refills at the same time. A holder that was read in several ways has all of them."""
        nbytes = Counter[str]()
        ways: defaultdict[str, set[str]] = defaultdict(set)
        for each in parts:
            nbytes.update(each.bytes_from)
            for holder, way in each.ways.items():
                ways[holder].add(way)
        told = {holder: " and ".join(sorted(its)) for holder, its in ways.items()}
        left = {holder for each in parts for holder in each.left}
        return cls(dict(nbytes), told, max((each.seconds for each in parts), default=0.0), (*left,))


Digests = npt.NDArray[np.uint64]
"""One digest per tensor of a plan, in the plan's order: shape ``[num_tensors]``."""

Fingerprint = npt.NDArray[np.uint64]
"""The sum of a version's digests, see `weightsync.memory.kernels.fingerprints`: shape ``[3]``."""


def combine(shares: Sequence[Digests]) -> Digests:
    """Add up several ranks' digests of the same tensors, or their fingerprints: uint64 with wrap-around."""
    total: Digests = np.add.reduce(list(shares), axis=0, dtype=np.uint64)
    return total


Samples = Sequence[tuple[float, int]]
"""Pairs of seconds since the first sample, and the bytes in use from that time on."""


@dataclass(frozen=True, slots=True)
class Published:
    """A source's report of the published version: the source's shares of the plan's tensors.

    Attributes:
        digests: uint64[num_tensors]; the shares of all ranks add up to the tensor's digest.
        nonfinite: number of elements that are NaN or Inf, by tensor name, for tensors that have any.
        written: names of tensors that changed while they were published.
    """

    digests: Digests
    nonfinite: Mapping[str, int]
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """A source's digests of boxes that other ranks hold, too.

    Attributes:
        digests: uint64[n], of the boxes of `plan.layout.replicas.SharedBoxes`; 0 for boxes of other rounds.
        agreement: words that add up to zero over all ranks if their digests of each box are equal.
    """

    digests: Digests
    agreement: Fingerprint


class PublishTask(msgspec.Struct, frozen=True):
    """The work of a trainer rank in a `publish`.

    Attributes:
        count: whether to count elements that are NaN or Inf.
        rounds: the rounds of `Plan.replicas` whose boxes are compared between ranks that hold the same boxes.
        density: whether to sample how many elements changed.
    """

    count: bool
    rounds: tuple[int, ...] = ()
    density: bool = False


class Sample(NamedTuple):
    """A rank's sample of a group of tensors. `numel` and `nbytes` are of the rank's whole share."""

    num: int
    num_changed: int
    numel: int
    nbytes: int


class PublishReport(msgspec.Struct, frozen=True):
    """A trainer rank's answer to `publish`.

    Attributes:
        fingerprint: the fingerprint of the rank's digests.
        frozen: the fingerprint of frozen tensors only.
        nonfinite, written: as in `Published`.
        spans: when it began, and its duration.
        agreement: as in `Compared`; None if nothing was compared.
        changed: samples of the changes since the version before, by group of tensors.
    """

    fingerprint: Fingerprint
    frozen: Fingerprint
    nonfinite: Mapping[str, int]
    spans: Sequence[Span]
    agreement: Fingerprint | None = None
    written: tuple[str, ...] = ()
    changed: Mapping[str, Sample] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle it quickly, which arrays do not: the driver gets one from each trainer rank."""
        rows = [row for row in (self.fingerprint, self.frozen, self.agreement) if row is not None]
        words = np.stack(rows).tobytes()
        return _publish_report, (words, self.nonfinite, self.spans, self.written, self.changed)


def _publish_report(
    words: bytes,
    nonfinite: Mapping[str, int],
    spans: Sequence[Span],
    written: tuple[str, ...],
    changed: Mapping[str, Sample],
) -> PublishReport:
    rows = np.frombuffer(words, np.uint64).reshape(-1, 3)
    agreement = rows[2] if len(rows) > 2 else None
    return PublishReport(rows[0], rows[1], nonfinite, spans, agreement, written, changed)


@dataclass(frozen=True, slots=True)
class HolderDigests:
    """A holder's digests of the bytes that it wrote into an engine rank's memory.

    Attributes:
        wholes: digests of the plan's tensors: uint64[num_tensors]. If the holder quantised, these are digests
            of the received tensors, else of the rank's parts in memory.
        stored: digests of the quantised tensors: uint64[num_stored]. Empty if the holder did not quantise.
        are_parts: the holder quantised, and only read the parts that the rank needs: `wholes` are of these
            parts.
    """

    wholes: Digests
    stored: Digests
    are_parts: bool = False

    @classmethod
    def of_live(cls, digests: Digests) -> HolderDigests:
        """Return digests of memory in which nothing was quantised."""
        return cls(digests, digests[:0])


@dataclass(frozen=True, slots=True)
class LiveDigest:
    """Digest of the parameters that an engine's own loader made of its tensors.

    Attributes:
        kind: equal for ranks with the same layout of parameters, on the same kind of device.
        digest: equal for such ranks if all their bytes are equal.
    """

    kind: str
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine rank's report of the loaded weights.

    Attributes:
        digests: uint64[num_tensors]; digests of the rank's boxes of the plan's tensors, as found in the
            engine.
        spans: when it began to load and to verify, and the durations.
        live: the digest of the live parameters, if the engine converts tensors.
        are_live: whether `digests` are of live parameters, and not of the input of the engine's own loader.
        are_copied: the holder wrote the live parameters of an equal engine. `digests` are zeros, then.
        are_compared: live parameters have the same digests as the tensors that the rank quantised.
        are_parts: `digests` are of the parts that the rank's holder read.
        takes_parts: the holder may only read these parts in the next update.
    """

    digests: Digests
    spans: Sequence[Span]
    live: LiveDigest | None = None
    are_live: bool = True
    are_copied: bool = False
    are_compared: bool = False
    are_parts: bool = False
    takes_parts: bool = False


class LoadReport(msgspec.Struct, frozen=True):
    """An engine's answer to `load`.

    Attributes:
        fingerprints: uint64[num_ranks, 3]; each row uses one replica of every part of a tensor.
        spans: the spans of each rank.
        live: the live digest of each rank.
        are_live: whether all ranks' digests are of live parameters.
        are_copied: whether all ranks' live parameters are copies. `fingerprints` are of zeros, then.
        are_compared: whether all ranks compared their live parameters with the quantised tensors.
        takes_parts: whether all ranks' holders may only read the needed parts in the next update.
    """

    fingerprints: Fingerprint
    spans: Sequence[Sequence[Span]]
    live: Sequence[LiveDigest | None] = ()
    are_live: bool = True
    are_copied: bool = False
    are_compared: bool = False
    takes_parts: bool = False
