"""Stops SGLang's scheduler at a forward pass, from a weight loader of ours that it runs in its process."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tests.patience import patient

if TYPE_CHECKING:
    from weightsync.engines.sglang.adapter import SglangEngine

LOADER = "tests.contract.sglang_hooks.stop_at"
WAIT_S = patient(30)

_hooks: list[Any] = []


class Event(Protocol):
    """Part of `threading.Event`."""

    def set(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class _File:
    """An Event between processes: a file that is there or not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def set(self) -> None:
        self._path.touch()

    def wait(self, timeout: float) -> bool:
        return _appears(self._path, timeout)


def stop_at(model: torch.nn.Module, named_tensors: Sequence[tuple[bytes, torch.Tensor]]) -> None:
    """Run by SGLang: stop at a forward pass, counted from now; at none, take the hook away."""
    forward, folder = pickle.loads(named_tensors[0][0])
    while _hooks:
        _hooks.pop().remove()
    passes = iter(range(1, 1 << 20))

    def hook(*_: object) -> None:
        if next(passes) == forward:
            (folder / "arrived").touch()
            _appears(folder / "go_on", WAIT_S)

    if forward:
        # SGLang calls the model's forward without its hooks, but not what is in it.
        _hooks.append(model.model.register_forward_pre_hook(hook))


@contextmanager
def stopped_at(engine: SglangEngine, forward: int, folder: Path) -> Iterator[tuple[Event, Event]]:
    """(arrived, go on)"""
    arrived, go_on = _File(folder / "arrived"), _File(folder / "go_on")
    _send(engine, forward, folder)
    try:
        yield arrived, go_on
    finally:
        go_on.set()
        _send(engine, 0, folder)


def _send(engine: SglangEngine, forward: int, folder: Path) -> None:
    engine.loop.call(lambda server: call_loader(server.manager, LOADER, [pickle.dumps((forward, folder))]))


async def call_loader(manager: Any, loader: str, names: Sequence[str | bytes], model: str = "target") -> None:
    """Have SGLang call a custom loader on each rank, with an empty tensor of its name, in a session."""
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    selector = {}
    if hasattr(manager, "begin_weight_update"):
        selector = {"selector": model}
        await manager.begin_weight_update(
            io_struct.BeginWeightUpdateReqInput(selector="draft")
        )  # if none is open
    request = io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[
            MultiprocessingSerializer.serialize([(name, torch.empty(0))]) for name in names
        ],
        load_format=loader,
        flush_cache=False,
        **selector,
    )
    ok, message = (await manager.update_weights_from_tensor(request, None))[:2]
    assert ok, message


def _appears(path: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
