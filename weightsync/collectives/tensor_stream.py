"""Streams named tensors from rank 0 to all other ranks, without a plan.

    with stream.sending(version=7) as put:      # rank 0
        for name, tensor in weights:
            put(name, tensor)

    for batch in stream.receiving():            # every other rank
        load(batch)                             # [(name, tensor), …], verified

For frameworks with iterators of named tensors. Receivers need no names or sizes in advance. A bucket travels
while the next bucket is packed and the previous bucket is unpacked. A receiver compares each tensor's digest
with the sender's digest before it yields the tensor, and the head, with names and shapes, with a checksum.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from weightsync.errors import ConfigError, StateError, VerifyError, WireError
from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digest_tiles import DigestPart
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box
from weightsync.protocol.decoding import decoded
from weightsync.transports.base import Broadcast, Pending, Transport

_ALIGN = 16
_SIZES_NBYTES = 32
_SLOTS = 2
_MOST_TABLES = 1024
"""The most digest tables on a device, one per bucket. A table takes 0.2 % of a bucket's bytes."""


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Elements ``start`` to ``start + num`` of a flattened tensor, at byte `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num: int
    offset: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """A bucket's contents. `number` counts from 0 within a version."""

    version: int
    number: int
    is_last: bool
    chunks: list[_Chunk]
    digests: list[int]


_heads = msgspec.msgpack.Decoder(_Head)


class TensorStream:
    """One rank's end of a stream, for any number of versions. The `Transport` must be open.

    A rank that fails aborts the communicator, so that no other rank waits: make a new communicator then.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        num_ranks: int,
        device: torch.device,
        bucket_nbytes: int = 256 << 20,
    ) -> None:
        """
        Args:
            device: the device of the transport. While a version moves, it needs twice `bucket_nbytes` there.
                On a GPU, 0.2 % of the version's size stays allocated.

        Raises ConfigError for a bucket that is too small for one element.
        """
        if bucket_nbytes < _ALIGN:
            raise ConfigError("bucket_nbytes", bucket_nbytes, f"give {_ALIGN} or more")
        self._transport, self._rank, self._num_ranks = transport, rank, num_ranks
        self._device, self._bucket_nbytes = device, -(-bucket_nbytes // _ALIGN) * _ALIGN
        self._digester = _Digester()

    @contextmanager
    def sending(self, version: int) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """Return a context with ``put(name, tensor)``; rank 0 only.

        `put` copies a tensor of any shape, dtype and device on the current stream. The block ends when every
        rank has verified all tensors. Raises TransportError with the cause if a rank is lost or late, or gave
        up.
        """
        assert self._rank == 0, "rank 0 sends"
        outgoing = _Outgoing(self._transport, self._device, version, self._bucket_nbytes, self._digester)
        try:
            yield outgoing.put
            outgoing.finish()
            self._wait_verified()
        except BaseException as error:
            self._transport.abort(f"rank 0 gave up: {type(error).__name__}: {error}")
            raise

    def receiving(self) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
        """Yield batches of whole tensors in the order of sending.

        Tensors may be views that are valid until the next batch; copies on a device must have ended by then.
        A receiver that stops before the end aborts all ranks.

        Raises:
            VerifyError: names tensors that arrived with wrong bytes. Their batch is not yielded.
            WireError: names or shapes arrived with wrong bytes.
            TransportError: a rank is lost or late, or gave up. Has the cause.
        """
        assert self._rank > 0, "rank 0 sends"
        yield from _Incoming(self._transport, self._device, f"rank {self._rank}", self._digester).batches()
        self._wait_verified()

    def _wait_verified(self) -> None:
        """Wait until every receiver has reported that all tensors are verified."""
        word = torch.zeros(self._num_ranks, 1, dtype=torch.uint8, device=self._device)
        for rank in range(1, self._num_ranks):
            self._transport.start([Broadcast(word[rank], rank)]).wait()


class _Outgoing:
    """The sending end with two buckets: one is packed while the other travels."""

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        version: int,
        bucket_nbytes: int,
        digester: _Digester,
    ) -> None:
        self._transport, self._device, self._version = transport, device, version
        self._digests = digester
        self._slots = [torch.empty(bucket_nbytes, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        self._travelling: list[list[tuple[Pending, torch.Tensor]]] = [[] for _ in range(_SLOTS)]
        self._number = self._used = 0
        self._chunks: list[_Chunk] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1)
        dtype, shape = str(flat.dtype).removeprefix("torch."), tuple(tensor.shape)
        start = 0
        while start < flat.numel() or not start:
            room = (len(self._slots[0]) - self._used) // flat.element_size()
            if not room:
                self._send(is_last=False)
                continue
            num = min(room, flat.numel() - start)
            chunk = _Chunk(name, dtype, shape, start, num, self._used)
            self._chunks.append(chunk)
            # Copied at once: the caller may reuse the memory for the next tensor.
            _cut(self._slots[self._at], chunk).copy_(flat[start : start + num])
            self._used += -(-num * flat.element_size() // _ALIGN) * _ALIGN
            start += num
            if not num:
                return

    def finish(self) -> None:
        self._send(is_last=True)
        for pending in self._travelling:
            _wait(pending)

    def _send(self, *, is_last: bool) -> None:
        data = self._slots[self._at][: self._used]
        digests = self._digests(data, [(chunk, _cut(data, chunk)) for chunk in self._chunks])
        head = msgspec.msgpack.encode(_Head(self._version, self._number, is_last, self._chunks, digests))
        sizes = _sizes(len(head), self._used, zlib.crc32(head))
        messages = (self._bytes(sizes), self._bytes(head), data)
        self._travelling[self._at] = [
            (self._transport.start([Broadcast(message, 0)]), message) for message in messages if len(message)
        ]
        self._number, self._used, self._chunks = self._number + 1, 0, []
        _wait(self._travelling[self._at])  # the previous bucket, whose slot is packed next

    @property
    def _at(self) -> int:
        return self._number % _SLOTS

    def _bytes(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)


class _Incoming:
    """The receiving end with two buckets: one is unpacked while the other arrives."""

    def __init__(self, transport: Transport, device: torch.device, name: str, digester: _Digester) -> None:
        self._transport, self._device, self._name = transport, device, name
        self._digests = digester
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
        self._part: torch.Tensor | None = None  # a tensor that is split between buckets

    def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        with ThreadPoolExecutor(1, thread_name_prefix="tensor-stream") as reader:
            try:
                yield from self._batches(reader)
            except BaseException as error:
                # Also ends the reader thread's wait for the next bucket.
                cause = "it took no more" if isinstance(error, GeneratorExit) else str(error)
                self._transport.abort(f"{self._name} gave up: {cause}")
                raise

    def _batches(self, reader: Executor) -> Iterator[list[tuple[str, torch.Tensor]]]:
        number, is_last = 0, False
        coming = reader.submit(self._read, 0)
        while not is_last:
            head, data = coming.result()
            if head.number != number:
                raise StateError(f"bucket {head.number} came where {number} was due")
            number, is_last = number + 1, head.is_last
            if not is_last:
                coming = reader.submit(self._read, number % _SLOTS)
            yield self._unpack(head, data)

    def _read(self, at: int) -> tuple[_Head, torch.Tensor]:
        sizes = self._receive(self._new(_SIZES_NBYTES))
        head_nbytes, nbytes, checksum, _ = np.frombuffer(sizes, np.int64).tolist()
        self._require(sizes == _sizes(head_nbytes, nbytes, checksum))
        came = self._receive(self._new(head_nbytes))
        self._require(zlib.crc32(came) == checksum)
        head = decoded(_heads.decode, came)
        if len(self._slots[at]) < nbytes:
            self._slots[at] = self._new(nbytes)
        data = self._slots[at][:nbytes]
        if nbytes:
            self._transport.start([Broadcast(data, 0)]).wait()
        return head, data

    def _require(self, is_whole: bool) -> None:
        if not is_whole:
            raise WireError(f"{self._name}: a bucket's head is damaged")

    def _receive(self, into: torch.Tensor) -> bytes:
        self._transport.start([Broadcast(into, 0)]).wait()
        return into.cpu().numpy().tobytes()

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _unpack(self, head: _Head, data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        cuts = [(chunk, _cut(data, chunk)) for chunk in head.chunks]
        found = zip(head.chunks, head.digests, self._digests(data, cuts), strict=True)
        wrong = [chunk.name for chunk, sent, came in found if sent != came]
        if wrong:
            raise VerifyError(self._name, head.version, wrong)
        whole = (self._join(chunk, cut) for chunk, cut in cuts)
        return [each for each in whole if each]

    def _join(self, chunk: _Chunk, cut: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        numel = math.prod(chunk.shape)
        if chunk.num == numel:
            return chunk.name, cut.view(chunk.shape)
        if self._part is None:
            self._part = torch.empty(numel, dtype=cut.dtype, device=self._device)
        self._part[chunk.start : chunk.start + chunk.num] = cut
        if chunk.start + chunk.num < numel:
            return None
        whole, self._part = self._part, None
        return chunk.name, whole.view(chunk.shape)


def _sizes(head_nbytes: int, nbytes: int, checksum: int) -> bytes:
    """Return the sizes of a bucket's head and data with the head's checksum, and a checksum of all three."""
    sizes = np.array([head_nbytes, nbytes, checksum], np.int64).tobytes()
    return sizes + np.array([zlib.crc32(sizes)], np.int64).tobytes()


def _cut(data: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return data[chunk.offset : chunk.offset + chunk.num * dtype.itemsize].view(dtype)


def _wait(travelling: list[tuple[Pending, torch.Tensor]]) -> None:
    """Wait for messages, whose memory is kept until then."""
    while travelling:
        pending, _message = travelling.pop(0)
        pending.wait()


class _Digester:
    """Computes the shares of chunks in the digests of flattened tensors."""

    def __init__(self) -> None:
        self._tables: dict[tuple[_Chunk, ...], tuple[int, DigestTable]] = {}  # with the address of the bucket

    def __call__(self, data: torch.Tensor, cuts: Sequence[tuple[_Chunk, torch.Tensor]]) -> list[int]:
        if data.is_cuda:
            return self._on_device(data, cuts)
        return [tensor_digest(cut, (math.prod(chunk.shape),), _box(chunk)) for chunk, cut in cuts]

    def _on_device(self, data: torch.Tensor, cuts: Sequence[tuple[_Chunk, torch.Tensor]]) -> list[int]:
        """Digest all chunks in one launch. Tables are stored, since later versions mostly repeat buckets."""
        with torch.cuda.device(data.device):
            chunks, address = tuple(chunk for chunk, _ in cuts), data.data_ptr()
            if self._tables.get(chunks, (None,))[0] != address:
                if len(self._tables) >= _MOST_TABLES:
                    self._tables.clear()
                self._tables[chunks] = address, _table(cuts)
            _, table = self._tables[chunks]
            table.launch(torch.cuda.current_stream())
            return [int(digest) for digest in table.result()]


def _table(cuts: Sequence[tuple[_Chunk, torch.Tensor]]) -> DigestTable:
    parts = [
        DigestPart(
            tensor=i,
            address=cut.data_ptr(),
            strides=(cut.element_size(),),
            box=_box(chunk),
            shape=(math.prod(chunk.shape),),
            itemsize=cut.element_size(),
        )
        for i, (chunk, cut) in enumerate(cuts)
        if cut.numel()
    ]
    return DigestTable(parts, len(cuts))


def _box(chunk: _Chunk) -> Box:
    return Box((chunk.start,), (chunk.num,))
