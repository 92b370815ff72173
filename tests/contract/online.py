"""Engines that quantise to FP8 when they start, without the engines' kernels, for one suite over both."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.sglang_online import Online, OnlineMoe
from tests.contract.sglang_quantised import host_of, trained, weights

Tensors = dict[str, torch.Tensor]
"""A trainer's weights, by name."""


class OnlineSglang:
    """A row has a scale. Places are proven when the engine connects."""

    one_scale, is_right = False, True

    def started(self, folder: Path, moe: bool, tensors: Tensors, **parts: Any) -> Any:
        """Return a model that the engine has loaded and quantised. `parts`: the share of the rank."""
        model = (OnlineMoe if moe else Online)(folder, **parts)
        with torch.no_grad():
            model.load_weights(tensors.items())
        return model.start()

    def host(self, model: nn.Module, folder: Path) -> Any:
        return host_of(model, folder)

    def state(self, model: Any) -> object:
        """Return the state beside parameters, which a trace must leave as it is."""
        return None

    def num_loads(self, model: Any) -> int:
        return int(model.num_loads)

    def loads_of_first(self, model: Any) -> int:
        """Return how much the first update adds to `num_loads`."""
        return 0


class OnlineVllm:
    """Matrices that vLLM fuses have one scale together. The first update proves the places."""

    one_scale, is_right = True, None

    def started(self, folder: Path, moe: bool, tensors: Tensors, **parts: Any) -> Any:
        from tests.contract import vllm_online

        return vllm_online.Online(folder, **parts).start(tensors)

    def host(self, model: nn.Module, folder: Path) -> Any:
        from tests.contract import vllm_online

        return vllm_online.host_of(model, folder)

    def state(self, model: Any) -> object:
        from tests.contract.vllm_online import DONE, quantised

        layers = quantised(model)
        assert all(getattr(each, DONE, False) for each in layers)
        held = [
            (id(each.quant_method), id(getattr(each.quant_method, "moe_kernel", None))) for each in layers
        ]
        return model.method.fp8_linear.num_rows, held

    def num_loads(self, model: Any) -> int:
        return int(model.num_processed)

    def loads_of_first(self, model: Any) -> int:
        from tests.contract.vllm_online import quantised

        return len(quantised(model))


OnlineEngine = OnlineSglang | OnlineVllm
ENGINES: dict[str, OnlineEngine] = {"sglang": OnlineSglang(), "vllm": OnlineVllm()}
MARKS = {
    "sglang": [],
    "vllm": [pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")],
}


def weights_of(folder: Path, moe: bool, seed: int) -> Tensors:
    """Return a trainer's weights. One row is zero, and with experts, more is special."""
    tensors = (weights if moe else trained)(folder, seed)
    if not moe:
        tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    return tensors
