"""Weights of DeepSpeed's engine: ZeRO-3 partitions where they lie, whole parameters of ZeRO-0, 1 and 2.

Nothing is gathered. Between steps, a ZeRO-3 parameter keeps its memory in ``ds_tensor``: an equal run of its
flattened elements on each rank, padded on the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import AddressGuard
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.runs import run_segments
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.tensors import TensorSource
from weightsync.sources.tested import warn_untested

_PART = "ds_tensor"
_CONTEXT_DEPTH = "_ds_z3_gathered_param_context_depth"
"""DeepSpeed's mark of parameters that a user has gathered."""


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter that ZeRO-3 has partitioned."""
    return hasattr(tensor, _PART)


class DeepSpeedSource(TensorSource):
    """Reads the engine that ``deepspeed.initialize`` returns, under the names of its module's ``state_dict``.

    Partitions are read where they are, on the GPU or offloaded to the host. So are those of parameters that
    persist whole on every rank: DeepSpeed's optimizer writes the partition first.
    """

    _partitioned: Sequence[tuple[str, Any]] = ()

    def _weights(self) -> LocalWeights:
        _check_engine(self.model)
        held, tied = named_tensors(self.model.module)
        self._partitioned = [(name, tensor) for name, tensor in held.items() if is_partitioned(tensor)]
        metas: list[TensorMeta] = []
        segments: list[Segment] = []
        for name, tensor in held.items():
            meta, its = _declare(name, tensor)
            metas.append(meta)
            segments += its
        return LocalWeights(RankLayout(tuple(metas), tuple(segments), tied), _live(held))

    def _watch(self, weights: LocalWeights) -> _Guard:
        return _Guard(self.model.module, weights.tensors, part=_PART)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return _live(named_tensors(self.model.module)[0])

    def _finish(self) -> None:
        """Require that partitions hold all changes that were made to gathered parameters.

        A forward pass may leave parameters gathered; their partitions are up to date. Those of offloaded
        weights were looked at before they were released.
        """
        if self._offloaded:
            return
        whole = [(name, held) for name, held in self._partitioned if held.ds_status.name == "AVAILABLE"]
        for name, held in whole:
            if getattr(held, _CONTEXT_DEPTH, 0):
                raise StateError(
                    f"trainer {self._rank}: {name} is gathered, so its partition is not what it will be: "
                    "leave deepspeed.zero.GatheredParameters before weights are sent"
                )
        differ = torch.stack([_differs(held) for _, held in whole]).tolist() if whole else []
        if True in differ:
            name, _ = whole[differ.index(True)]
            raise StateError(
                f"trainer {self._rank}: {name} was changed while it was gathered, and its partition was not: "
                "change it within deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
            )


class _Guard(AddressGuard):
    """Addresses of an engine's module."""

    def as_before(self, model: Any) -> bool:  # noqa: ANN401
        return super().as_before(model.module)


def _live(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that have the memory of `held`."""
    return {name: getattr(tensor, _PART, tensor) for name, tensor in held.items()}


def _check_engine(engine: Any) -> None:  # noqa: ANN401
    kind = type(engine).__name__
    if kind == "PipelineEngine":
        raise ConfigError("self.model", kind, "DeepSpeed's pipeline engine is not supported: use ZeRO-3")
    if engine.autotp_size() > 1:
        remedy = "DeepSpeed does not say how AutoTP cuts parameters: use ZeRO-3 without it"
        raise ConfigError("tensor_parallel.autotp_size", engine.autotp_size(), remedy)
    warn_untested("deepspeed")


def _declare(name: str, tensor: Any) -> tuple[TensorMeta, tuple[Segment, ...]]:  # noqa: ANN401
    """Return a tensor's global shape and this rank's segments of it."""
    if not is_partitioned(tensor):
        meta = meta_of(name, tensor)
        return meta, (Segment(name, Box.whole(meta.shape), name, 0, byte_strides(tensor)),)
    _check_part(name, tensor.ds_tensor)
    dtype = str(tensor.ds_tensor.dtype).removeprefix("torch.")
    meta = TensorMeta(name, dtype, tuple(tensor.ds_shape))
    return meta, run_segments(meta, *_run(tensor), name)


def _run(tensor: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the first element of a flattened parameter that this rank holds, and one past the last."""
    start = min(tensor.ds_tensor.ds_numel * tensor.ds_zero_partition_rank, tensor.ds_numel)
    return start, min(start + tensor.ds_tensor.ds_numel, tensor.ds_numel)


def _differs(tensor: Any) -> torch.Tensor:  # noqa: ANN401
    """Compare a gathered parameter with this rank's partition, as bytes: a bool of no dimensions."""
    start, stop = _run(tensor)
    whole = tensor.data.reshape(-1)[start:stop].view(torch.uint8)
    part = tensor.ds_tensor[: stop - start].view(torch.uint8)
    differs: torch.Tensor = (whole != part.to(whole.device)).any()
    return differs


def _check_part(name: str, part: Any) -> None:  # noqa: ANN401
    if getattr(part.final_location, "value", part.final_location) == "nvme":
        remedy = "weights cannot be read from NVMe: offload parameters to the CPU (offload_param.device: cpu)"
        raise ConfigError(f"{name}: offload_param.device", "nvme", remedy)
    if hasattr(part, "ds_quant_scale"):
        remedy = "a quantized partition is not the weights: turn zero_quantized_nontrainable_weights off"
        raise ConfigError(f"{name}: zero_quantized_nontrainable_weights", True, remedy)
