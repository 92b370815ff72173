"""Named tensors through NCCL, one process a GPU."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.patience import patient
from weightsync.collectives.tensor_stream import TensorStream
from weightsync.transports.nccl import NcclTransport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TIMEOUT_S = patient(60)
BUCKET_NBYTES = 1 << 20
VERSIONS = (1, 2)


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    shapes = [(1000, 700), (), (3,), (0, 4), (4096,)]
    return {f"t{i}": torch.randn(shape, generator=draw).bfloat16() for i, shape in enumerate(shapes)}


def work(rank: int, num_ranks: int, rendezvous: multiprocessing.Queue) -> bool:
    torch.cuda.set_device(rank)
    transport = NcclTransport()
    if rank == 0:
        address = transport.offer("127.0.0.1")
        for _ in range(1, num_ranks):
            rendezvous.put(address)
    else:
        address = rendezvous.get(timeout=TIMEOUT_S)
    transport.open(address, rank, num_ranks, TIMEOUT_S)
    stream = TensorStream(transport, rank, num_ranks, torch.device("cuda", rank), BUCKET_NBYTES)
    equal = all(_send(stream, each) if rank == 0 else _receive(stream, each) for each in VERSIONS)
    transport.close()
    return equal


def _send(stream: TensorStream, version: int) -> bool:
    with stream.sending(version) as put:
        for number, (name, tensor) in enumerate(weights(version).items()):
            put(name, tensor.cuda() if number % 2 else tensor)
    return True


def _receive(stream: TensorStream, version: int) -> bool:
    held = {name: tensor.cpu() for batch in stream.receiving() for name, tensor in batch}
    wanted = weights(version)
    return list(held) == list(wanted) and all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_all_arrive_on_every_gpu() -> None:
    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        pytest.skip("needs 2 GPUs")
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(num_ranks, context) as pool:
        rendezvous = manager.Queue()
        done = [pool.submit(work, rank, num_ranks, rendezvous) for rank in range(num_ranks)]
        assert all(each.result(TIMEOUT_S) for each in done)
