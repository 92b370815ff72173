"""Reads the partition of a parameter that ZeRO-3 stores on one rank.

Between steps, a parameter is empty. Its partition, in ``ds_tensor``, is an equal run of its flattened
elements on each rank, padded on the last. Parameters that persist whole on every rank have partitions, too,
and DeepSpeed's optimizer writes those first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.plan import Segment, TensorMeta
from weightsync.plan.layout.runs import run_segments

PART = "ds_tensor"
"""The attribute of a parameter that has the partition."""
_CONTEXT_DEPTH = "_ds_z3_gathered_param_context_depth"
"""DeepSpeed's mark of parameters that a user has gathered."""


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a parameter that ZeRO-3 has partitioned."""
    return hasattr(tensor, PART)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has a parameter's memory on this rank: the partition, if there is one."""
    part: torch.Tensor = getattr(tensor, PART, tensor)
    return part


def with_memory(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `held` with partitions in place of partitioned parameters."""
    return {name: part_of(tensor) for name, tensor in held.items()}


def check_partition(name: str, tensor: Any) -> None:  # noqa: ANN401 - DeepSpeed's parameter
    """Raise ConfigError if a parameter's partition is not in memory, or is quantised."""
    part = tensor.ds_tensor
    if getattr(part.final_location, "value", part.final_location) == "nvme":
        remedy = "weights cannot be read from NVMe: offload parameters to the CPU (offload_param.device: cpu)"
        raise ConfigError(f"{name}: offload_param.device", "nvme", remedy)
    if hasattr(part, "ds_quant_scale"):
        remedy = "a quantized partition is not the weights: turn zero_quantized_nontrainable_weights off"
        raise ConfigError(f"{name}: zero_quantized_nontrainable_weights", True, remedy)


def whole_meta(name: str, tensor: Any) -> TensorMeta:  # noqa: ANN401 - DeepSpeed's parameter
    """Return the dtype and global shape of a partitioned parameter."""
    return TensorMeta(name, str(tensor.ds_tensor.dtype).removeprefix("torch."), tuple(tensor.ds_shape))


def run_of(tensor: Any) -> tuple[int, int]:  # noqa: ANN401 - DeepSpeed's parameter
    """Return this rank's range of a flattened parameter: the first element, and one past the last."""
    start = min(tensor.ds_tensor.ds_numel * tensor.ds_zero_partition_rank, tensor.ds_numel)
    return start, min(start + tensor.ds_tensor.ds_numel, tensor.ds_numel)


def part_segments(meta: TensorMeta, tensor: Any) -> tuple[Segment, ...]:  # noqa: ANN401 - DeepSpeed's
    """Return this rank's boxes of `meta`. The buffer, named as `meta`, begins with this rank's run."""
    return run_segments(meta, *run_of(tensor), meta.name)


def require_current(rank: int, partitioned: Iterable[tuple[str, Any]]) -> None:
    """Require that partitions have all changes to gathered parameters.

    A forward pass may leave parameters gathered, with partitions that are up to date. Raises StateError,
    which names trainer `rank` and a parameter.
    """
    whole = [(name, held) for name, held in partitioned if held.ds_status.name == "AVAILABLE"]
    for name, held in whole:
        if getattr(held, _CONTEXT_DEPTH, 0):
            raise StateError(
                f"trainer {rank}: {name} is gathered, so its partition is not what it will be: "
                "leave deepspeed.zero.GatheredParameters before weights are sent"
            )
    differ = torch.stack([_differs(held) for _, held in whole]).tolist() if whole else []
    if True in differ:
        name, _ = whole[differ.index(True)]
        raise StateError(
            f"trainer {rank}: {name} was changed while it was gathered, and its partition was not: "
            "change it within deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
        )


def _differs(tensor: Any) -> torch.Tensor:  # noqa: ANN401 - DeepSpeed's parameter
    """Compare a gathered parameter with this rank's partition, as bytes: a bool of no dimensions."""
    start, stop = run_of(tensor)
    whole = tensor.data.reshape(-1)[start:stop].view(torch.uint8)
    part = tensor.ds_tensor[: stop - start].view(torch.uint8)
    differs: torch.Tensor = (whole != part.to(whole.device)).any()
    return differs
