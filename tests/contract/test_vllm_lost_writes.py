"""A loader in a real vLLM reload drops a tensor without a word: each is caught, and named."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightsync.engines.vllm.reload import LayerwiseReload, rehearse
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

CONFIG = SimpleNamespace(dtype=torch.float32, quantization=None)
CPU = torch.device("cpu")
Write = Callable[[nn.Module, nn.Parameter, torch.Tensor], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(4, 1), requires_grad=False)
        self.register_buffer("mask", torch.zeros(2), persistent=False)


class Model(nn.Module):
    """Loads as vLLM's models do, except for the last layer's scale, which `write` takes."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.layers, self.write = nn.ModuleList([Layer(), Layer()]), write

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameter = parameters[name]
            if name == "layers.1.scale":
                self.write(self.layers[1], parameter, weight)
            else:
                as_vllm(self, parameter, weight)


def as_vllm(_: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
    getattr(parameter, "weight_loader", torch.Tensor.copy_)(parameter, weight)


def directly(_: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
    parameter.data.copy_(weight)


def replaced(layer: nn.Module, _: nn.Parameter, weight: torch.Tensor) -> None:
    layer.scale = nn.Parameter(weight, requires_grad=False)


def swallowed(_: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
    with suppress(AssertionError):
        as_vllm(_, parameter, weight[:3])


def broadcast(_: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
    parameter.data.copy_(weight[0])


def into_a_copy(_: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
    torch.empty_like(parameter).copy_(weight)


def skipped(*_: object) -> None:
    """Passes over it."""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.{leaf}": torch.full(shape, value + layer)
        for layer in (0, 1)
        for leaf, shape in (("weight", (4, 3)), ("scale", (4, 1)))
    }


def recorded(model: nn.Module) -> nn.Module:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    return model


def update(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    reload = LayerwiseReload(model, CONFIG, CPU).witness()
    try:
        reload.load([*given.items()][:2])
        reload.load([*given.items()][2:])
        reload.finish()
    except RuntimeError:
        reload.abandon()
        raise


METAS = [TensorMeta(name, "float32", tuple(each.shape)) for name, each in tensors(1.0).items()]
LOST = pytest.mark.parametrize("write", [replaced, swallowed, broadcast, into_a_copy, skipped])


@LOST
def test_a_tensor_that_a_loader_drops_is_named_when_connecting(write: Write) -> None:
    model = recorded(Model(write))
    before = {name: (each, each.clone()) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"model: 'Model' .*left out layers\.1\.scale.*: 1 tensors"):
        rehearse(model, CONFIG, CPU, METAS)
    for name, each in model.named_parameters():
        assert each is before[name][0]
        assert each.equal(before[name][1])


@LOST
def test_a_tensor_that_a_loader_drops_is_named_in_the_update(write: Write) -> None:
    with pytest.raises(RuntimeError, match=r"left out layers\.1\.scale.*: 1 tensors are not whole"):
        update(recorded(Model(write)), tensors(1.0))


@pytest.mark.parametrize("write", [as_vllm, directly])
def test_what_is_written_directly_becomes_live_in_each_update(write: Write) -> None:
    model = recorded(Model(write))
    live = dict(model.named_parameters())
    rehearse(model, CONFIG, CPU, METAS)
    for value in (1.0, 2.0, 2.0):
        update(model, tensors(value))
        for name, tensor in tensors(value).items():
            assert live[name].equal(tensor), name
        assert dict(model.named_parameters()) == live


@pytest.mark.parametrize("write", [swallowed, into_a_copy, skipped])
def test_a_loader_that_starts_to_drop_a_tensor_is_named_in_a_later_update(write: Write) -> None:
    model = recorded(Model(as_vllm))
    update(model, tensors(1.0))
    model.write = write
    with pytest.raises(RuntimeError, match=r"left out a part of layers\.1: 1 tensors"):
        update(model, tensors(2.0))
    model.write = as_vllm
    update(model, tensors(3.0))
    assert model.layers[1].scale.equal(torch.full((4, 1), 4.0))


def test_what_vllm_forgets_is_named_by_its_warning_and_by_what_lives() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def forget(layer: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        get_layerwise_info(layer).load_numel = -12
        as_vllm(layer, parameter, weight)
        get_layerwise_info(layer).load_numel = 0

    with pytest.raises(RuntimeError) as told:
        update(recorded(Model(forget)), tensors(1.0))
    for reason in (
        "layers.1.weight (not written)",
        "layers.1.scale (not written)",
        "layers.1 (not loaded, says vLLM): 3 tensors",
    ):
        assert reason in str(told.value)


def test_a_buffer_that_vllm_does_not_save_is_written_where_it_lives() -> None:
    def write(layer: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        layer.mask.copy_(weight[:2, 0])
        as_vllm(layer, parameter, weight)

    model = recorded(Model(write))
    mask = model.layers[1].mask
    rehearse(model, CONFIG, CPU, METAS)
    for value in (1.0, 2.0):
        update(model, tensors(value))
        assert model.layers[1].mask is mask
        assert mask.tolist() == [value + 1, value + 1]


def test_a_loader_that_reads_values_is_counted_in_the_first_update() -> None:
    def read(layer: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        if weight.sum().item():
            as_vllm(layer, parameter, weight)

    model = recorded(Model(read))
    rehearse(model, CONFIG, CPU, METAS)
    update(model, tensors(1.0))


@pytest.mark.parametrize("write", [as_vllm, directly])
def test_a_tensor_comes_in_the_dtype_that_is_kept_whatever_its_name(write: Write) -> None:
    halves = [dataclasses.replace(meta, dtype="bfloat16") for meta in METAS]
    assert rehearse(recorded(Model(write)), CONFIG, CPU, halves) == tuple(METAS)


def test_a_parameter_that_a_loader_makes_anew_is_named_when_connecting() -> None:
    def renew(layer: nn.Module, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        as_vllm(layer, parameter, weight)
        layer.bias = nn.Parameter(torch.zeros(4))

    with pytest.raises(ConfigError, match=r"vLLM makes layers\.\d\.bias anew in each load"):
        rehearse(recorded(Model(renew)), CONFIG, CPU, METAS)
