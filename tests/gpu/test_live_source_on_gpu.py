"""A GPU's live memory is read over ZeroMQ, while the GPU works on other streams."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.patience import patient
from weightsync.errors import ReadError
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.live_source import LiveSource
from weightsync.holder.snapshots import HEADER_NBYTES, encode_header
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.messages import SnapshotHeader
from weightsync.readers import Read, open_reader

pytestmark = pytest.mark.gpu


def test_the_bytes_of_a_gpu_are_read_until_they_are_withdrawn() -> None:
    header = SnapshotHeader(3, "layout", 0)
    live = {
        name: torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        for name, nbytes in (("b", (5 << 20) + 3), ("a", 77), ("c", 1 << 20))
    }
    torch.cuda.synchronize()
    wanted = encode_header(header) + b"".join(live[name].cpu().numpy().tobytes() for name in sorted(live))
    source = LiveSource("holder 0", "127.0.0.1", None)
    with source.writing(1):
        pass
    offer = source.offer(header, FlatSnapshot(live), 2)
    target = SharedBuffer.create(len(wanted))
    whole = Read("source", 0, 0, 0, len(wanted))
    with contextlib.closing(target), contextlib.closing(open_reader([target], {"source": offer})) as reader:
        reader.read([whole], patient(20))
        assert target.tensor.numpy().tobytes() == wanted
        live["b"].fill_(7)  # on the engine's stream
        torch.cuda.synchronize()
        reader.read([Read("source", HEADER_NBYTES + 77, 0, 0, 5)], patient(20))
        assert target.tensor[:5].tolist() == [7] * 5
        source.end()
        with pytest.raises(ReadError):
            reader.read([whole], patient(20))
