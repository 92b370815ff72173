"""Runs in an engine's ranks: reads live weights and times the loader.

SGLang calls `receive`, a custom weight loader; vLLM calls `on_worker`, by ``collective_rpc``. Timing waits
for the device before and after, as a loader only starts copies.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.models import Tensor
from benchmarks.values import count_wrong, poison
from weightsync.memory.tensors import segment_view
from weightsync.plan import RankLayout
from weightsync.protocol.timing import PhaseClock

__all__ = ["LOADER", "answer", "on_worker", "receive", "synchronize"]

LOADER = "benchmarks.rank_probe.receive"

_clock = PhaseClock()
"""The clock of this process's rank."""


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[bytes, torch.Tensor]]) -> None:
    """Run a command for SGLang: the name of an empty tensor. The answer goes to a file."""
    file, command, args = pickle.loads(named_tensors[0][0])
    if _clock.spans and _clock.spans[-1].name == "open":
        _clock.spans.pop()  # the span of this call itself
    if command == "watch":
        _watch_sglang()
    with torch.inference_mode(False), torch.no_grad():
        outcome = answer(model, command, args)
    if file:
        Path(file).write_bytes(pickle.dumps(outcome))


def on_worker(worker: Any, command: str, args: Sequence[Any]) -> Any:  # noqa: ANN401 (vLLM's Worker)
    """Run a command for vLLM, which calls this with its worker."""
    if command == "watch":
        _watch_vllm(getattr(worker, "weight_transfer_engine", None))
    with torch.inference_mode(False), torch.no_grad():
        return answer(worker.model_runner.model, command, args)


def answer(model: torch.nn.Module, command: str, args: Sequence[Any]) -> Any:  # noqa: ANN401
    """Run one of `_COMMANDS` and return its outcome."""
    return _COMMANDS[command](model, *args)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _nothing(model: torch.nn.Module) -> None:
    """Do nothing, to measure the cost of a call."""


def _watch(model: torch.nn.Module) -> None:
    """Time the model's own loader from now on, as ``load``."""
    model.load_weights = _timed("load", model.load_weights)  # type: ignore[assignment, arg-type]


def _seconds(model: torch.nn.Module) -> Mapping[str, float]:
    """Return the seconds of each timed part since `_poison`."""
    return _clock.seconds


def _poison(model: torch.nn.Module) -> None:
    """Make every byte of every parameter wrong and reset the clock."""
    for parameter in model.parameters():
        poison([parameter.data])
    synchronize()
    _clock.spans.clear()


def _wrong(
    model: torch.nn.Module,
    layout: RankLayout,
    tensors: Sequence[Tensor],
    version: int,
    touched: Mapping[int, float] = MappingProxyType({}),
) -> int:
    """Count live elements, located by `layout`, that differ from `version`, see `count_wrong`."""
    live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    known = {tensor.name: tensor for tensor in tensors}
    assert {segment.tensor for segment in layout.segments} == set(known)
    held = (
        (known[segment.tensor], segment.box, segment_view(live[segment.buffer], segment))
        for segment in layout.segments
    )
    return count_wrong(held, version, touched)


_COMMANDS: dict[str, Callable[..., Any]] = {
    "nothing": _nothing,
    "watch": _watch,
    "seconds": _seconds,
    "poison": _poison,
    "wrong": _wrong,
}


def _watch_sglang() -> None:
    """Time how SGLang maps the payload of a call, as ``open``."""
    from sglang.srt.managers import tp_worker

    class Timed(tp_worker.MultiprocessingSerializer):  # type: ignore[misc]
        deserialize = staticmethod(_timed("open", tp_worker.MultiprocessingSerializer.deserialize))

    tp_worker.MultiprocessingSerializer = Timed


def _watch_vllm(engine: Any) -> None:  # noqa: ANN401 (its weight transfer engine, or None)
    """Time vLLM's whole receiving as ``receive``, which includes ``load``."""
    if engine is not None:
        engine.receive_weights = _timed("receive", engine.receive_weights)


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (whatever it takes)
        synchronize()
        with _clock.phase(name):
            outcome = call(*args, **kwargs)
            synchronize()
        return outcome

    return timed
