"""What DeepSpeed's source refuses, on stand-ins: real engines are in tests/contract/test_deepspeed.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.sources.zero.deepspeed import DeepSpeedSource


class Engine:
    """A stand-in for DeepSpeed's engine: rank 1 of 2, which holds half of one weight."""

    def __init__(self, location: str | None = None, num_tensor_ranks: int = 1) -> None:
        self.module = nn.Linear(3, 2, bias=False)
        self._num_tensor_ranks = num_tensor_ranks
        weight: Any = self.module.weight
        weight.ds_tensor = torch.arange(3.0)
        weight.ds_tensor.ds_numel, weight.ds_tensor.final_location = 3, location
        weight.ds_shape, weight.ds_numel, weight.ds_zero_partition_rank = (2, 3), 6, 1
        weight.ds_status, weight.ds_persist = SimpleNamespace(name="NOT_AVAILABLE"), False
        weight.data = torch.empty(0)

    def autotp_size(self) -> int:
        return self._num_tensor_ranks


class PipelineEngine(Engine):
    pass


def test_a_rank_declares_its_run() -> None:
    (segment,) = DeepSpeedSource(Engine()).layout().segments
    assert (segment.box.offset, segment.box.extent) == ((1, 0), (1, 3))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Engine(location="nvme"), r"weight: offload_param\.device: 'nvme' .*offload parameters to the CPU"),
        (Engine(num_tensor_ranks=2), r"tensor_parallel\.autotp_size: 2 .*use ZeRO-3 without it"),
        (PipelineEngine(), r"self\.model: 'PipelineEngine' .*use ZeRO-3"),
    ],
    ids=["NVMe", "AutoTP", "pipeline"],
)
def test_what_cannot_be_read_is_refused(engine: Engine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedSource(engine).layout()


def test_a_quantized_partition_is_refused() -> None:
    engine = Engine()
    engine.module.weight.ds_tensor.ds_quant_scale = torch.ones(1)  # type: ignore[attr-defined, union-attr]
    with pytest.raises(ConfigError, match=r"weight: zero_quantized_nontrainable_weights"):
        DeepSpeedSource(engine).layout()
