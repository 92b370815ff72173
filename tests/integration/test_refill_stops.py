"""A refill that waits for a host that says nothing, as one whose link is cut."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.holder.refill import Refill
from weightsync.memory.host import SharedBuffer
from weightsync.plan.broadcast.plan import Portion
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.messages import Snapshot


class Sink:
    """Takes one bucket of 16 bytes, which never comes."""

    num_buckets = 1

    def __init__(self) -> None:
        self.targets = [SharedBuffer.create(16)]

    def portions(self, bucket: int) -> Sequence[Portion]:
        return [Portion(0, 0, 0, 16)]

    def wait_free(self, bucket: int) -> None:
        """Return at once: the target is free."""

    def land(self, bucket: int) -> None:
        raise AssertionError("no byte came")

    def finish(self) -> None:
        raise AssertionError("no byte came")


def test_it_can_be_stopped_long_before_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        silent.settimeout(patient(20))
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        memory = BufferHandle(pid=0, fd=0, name="", nbytes=8192)
        offer = Offer(
            holder="holder 1",
            protocol="zeromq",
            memory=memory,
            endpoint=endpoint,
            secret="s",
        )
        sink = Sink()
        refill = Refill(Snapshot(1, "layout", {0: [offer]}), sink, may_map=False, timeout_s=patient(600))
        running = threads.submit(refill.run)
        try:
            connection, _ = silent.accept()
            refill.stop("an update starts")
            error = running.exception(timeout=patient(20))
            connection.close()
        finally:
            refill.close()
            sink.targets[0].close()
    assert type(error) is TransportError
