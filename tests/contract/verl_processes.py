"""Ranks of verl's, in processes of their own, with its registry; run by test_verl.py.

    python -m tests.contract.verl_processes

Two actors of which one sends, two rollouts; one rollout leaves after the second update.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

NUM_ACTORS, NUM_ROLLOUTS = 2, 2
BUCKET_NBYTES = 1000  # smaller than the largest tensor
TIMEOUT_S = 60.0


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(version)
    for number, shape in enumerate([(40, 17), (), (3,), (0, 4), (8, 8)]):
        yield f"layer.{number}.weight", torch.randn(shape, generator=draw).to(torch.bfloat16)


def main(pipe: Connection, is_actor: bool, is_master: bool) -> None:
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("weightsync.plugins.verl")
    role = {"is_master": is_master} if is_actor else {}
    engine = CheckpointEngineRegistry.new(
        "weightsync", bucket_size=BUCKET_NBYTES, transport="gloo", timeout_s=TIMEOUT_S, **role
    )
    pipe.send("ready")
    while True:
        method, arguments = pipe.recv()
        if method == "send":
            pipe.send(asyncio.run(engine.send_weights(weights(arguments), global_steps=arguments)))
        elif method == "receive":
            pipe.send(asyncio.run(_receive(engine, arguments)))
        else:
            pipe.send(getattr(engine, method)(**arguments))
        if method == "init_process_group":
            pipe.send(engine._place.epoch)


async def _receive(engine, version: int) -> bool:
    held = {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=version)}
    wanted = dict(weights(version))
    return list(held) == list(wanted) and all(torch.equal(held[name], wanted[name]) for name in wanted)


def update(pipes: list[Connection], num_rollouts: int, version: int) -> list[str]:
    """As verl's CheckpointEngineManager does it; returns which communicator each rank has."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    pipes = pipes[: NUM_ACTORS + num_rollouts]
    metadata = ask(pipes, [("prepare", {})] * len(pipes))
    actors, rollouts = CheckpointEngineRegistry.get("weightsync").build_topology(
        NUM_ACTORS, num_rollouts, metadata
    )
    each = [{key: values[i] for key, values in actors.items()} for i in range(NUM_ACTORS)]
    each += [{key: values[i] for key, values in rollouts.items()} for i in range(num_rollouts)]
    ask(pipes, [("init_process_group", arguments) for arguments in each])
    joined = [pipe.recv() for pipe in pipes]
    orders = [("send", version)] * NUM_ACTORS + [("receive", version)] * num_rollouts
    assert ask(pipes, orders) == [None] * NUM_ACTORS + [True] * num_rollouts
    ask(pipes, [("finalize", {})] * len(pipes))
    return joined


def ask(pipes: list[Connection], orders: list[tuple[str, object]]) -> list[object]:
    for pipe, order in zip(pipes, orders, strict=True):
        pipe.send(order)
    for pipe in pipes:
        assert pipe.poll(TIMEOUT_S), "a rank does not answer"
    return [pipe.recv() for pipe in pipes]


if __name__ == "__main__":
    importlib.import_module("weightsync.plugins.verl")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(NUM_ACTORS + NUM_ROLLOUTS):
        mine, its = context.Pipe()
        processes.append(context.Process(target=main, args=(its, index < NUM_ACTORS, index == 0)))
        processes[-1].start()
        its.close()
        pipes.append(mine)
    try:
        assert [pipe.recv() for pipe in pipes] == ["ready"] * len(pipes)
        first, again = update(pipes, 2, 1), update(pipes, 2, 2)
        assert first == again, "the communicator was not kept"
        fewer = update(pipes, 1, 3)
        assert fewer[0] != again[0], "who left is waited for"
        update(pipes, 2, 4)
    finally:  # as Ray ends verl's workers, which close nothing
        for process in processes:
            process.kill()
