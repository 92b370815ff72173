"""What a benchmark does in the processes of an engine's ranks: looks at live weights, times their loader.

SGLang calls `receive`, a custom weight loader; vLLM calls `on_worker`, by ``collective_rpc``. What is timed
waits for the device on both sides: a loader only starts copies.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
"""Of this process's rank."""


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[bytes, torch.Tensor]]) -> None:
    """For SGLang: the name of an empty tensor is the call. The answer goes to a file: none is returned."""
    file, command, args = pickle.loads(named_tensors[0][0])
    if _clock.spans and _clock.spans[-1].name == "open":
        _clock.spans.pop()  # of this call
    if command == "watch":
        _watch_sglang()
    with torch.inference_mode(False), torch.no_grad():
        outcome = answer(model, command, args)
    if file:
        Path(file).write_bytes(pickle.dumps(outcome))


def on_worker(worker: Any, command: str, args: Sequence[Any]) -> Any:  # noqa: ANN401 (vLLM's Worker)
    """For vLLM: called with its worker."""
    if command == "watch":
        _watch_vllm(getattr(worker, "weight_transfer_engine", None))
    with torch.inference_mode(False), torch.no_grad():
        return answer(worker.model_runner.model, command, args)


def answer(model: torch.nn.Module, command: str, args: Sequence[Any]) -> Any:  # noqa: ANN401
    """The outcome of one of `_COMMANDS`."""
    return _COMMANDS[command](model, *args)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _nothing(model: torch.nn.Module) -> None:
    """What a call costs that does nothing."""


def _watch(model: torch.nn.Module) -> None:
    """Time the model's own loader from now on, as ``load``."""
    model.load_weights = _timed("load", model.load_weights)  # type: ignore[assignment, arg-type]


def _seconds(model: torch.nn.Module) -> Mapping[str, float]:
    """Of each thing that is timed, since `_poison`."""
    return _clock.seconds


def _poison(model: torch.nn.Module) -> None:
    """Make every byte of every parameter wrong, and count time anew."""
    for parameter in model.parameters():
        poison([parameter.data])
    synchronize()
    _clock.spans.clear()


def _wrong(model: torch.nn.Module, layout: RankLayout, tensors: Sequence[Tensor], version: int) -> int:
    """Elements of the live parameters that are not those of `version`, where `layout` says that they lie."""
    live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    known = {tensor.name: tensor for tensor in tensors}
    assert {segment.tensor for segment in layout.segments} == set(known)
    held = (
        (known[segment.tensor], segment.box, segment_view(live[segment.buffer], segment))
        for segment in layout.segments
    )
    return count_wrong(held, version)


_COMMANDS: dict[str, Callable[..., Any]] = {
    "nothing": _nothing,
    "watch": _watch,
    "seconds": _seconds,
    "poison": _poison,
    "wrong": _wrong,
}


def _watch_sglang() -> None:
    """Time how it maps what a call brings, as ``open``."""
    from sglang.srt.managers import tp_worker

    class Timed(tp_worker.MultiprocessingSerializer):  # type: ignore[misc]
        deserialize = staticmethod(_timed("open", tp_worker.MultiprocessingSerializer.deserialize))

    tp_worker.MultiprocessingSerializer = Timed


def _watch_vllm(engine: Any) -> None:  # noqa: ANN401 (its weight transfer engine, or None)
    """Time its whole receiving, as ``receive``; ``load`` is inside."""
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
