"""Stands in for flash-attn, which needs CUDA, and for the calls of CUDA that OpenRLHF makes in any case.

Every process of OpenRLHF with a model imports flash-attn, and so has torch and DeepSpeed as changed here.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import deepspeed
import deepspeed.ops.adam
import torch
from torch.distributed import device_mesh


class Cpu(str):
    """The current device: a device for tensors, a number in a name such as ``cuda:0``."""

    def __format__(self, _: str) -> str:
        return "0"


def init_device_mesh(_: str, *args: Any, **options: Any) -> Any:
    return _init_device_mesh("cpu", *args, **options)


def adam(parameters: Any, adam_w_mode: bool, **options: Any) -> torch.optim.Optimizer:
    assert adam_w_mode
    return torch.optim.AdamW(parameters, **options)


for module in ("bert_padding", "utils.distributed"):
    sys.modules[f"{__name__}.{module}"] = MagicMock()  # for packed sequences and ring attention
_init_device_mesh, device_mesh.init_device_mesh = device_mesh.init_device_mesh, init_device_mesh
torch.cuda.current_device = partial(Cpu, "cpu")  # type: ignore[assignment]
torch.cuda.set_device = lambda _: None  # not one function for both, since Dynamo has rules by function
torch.cuda.synchronize = lambda *_: None
deepspeed.ops.adam.FusedAdam = adam  # it would be compiled, and
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # this for minutes
