"""Weights that somebody writes while a rank publishes them are named, however they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.source_ranks import Model, plan_for
from tests.unit.sources.test_lora import adapted, plan_of
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.protocol.messages import Published
from weightsync.sources import make_source
from weightsync.sources.lora.lora import LoraSource
from weightsync.sources.tensors import TensorSource

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def counted(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def uncounted(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def foreign(tensor: torch.Tensor) -> None:
    np.add(tensor.detach().numpy(), 1, out=tensor.detach().numpy())


class Written:
    """Calls `write` once the first pass over a source's weights is over."""

    def __init__(self, source: TensorSource, write: Callable[[], None]) -> None:
        self._confirmed, self._write = source._confirmed, write

    def __call__(self, published: Published, digest_again: Callable[[], Any]) -> Published:
        self._write()
        return self._confirmed(published, digest_again)


def written(source: TensorSource, plan: Plan, write: Callable[[], None], monkeypatch: Any) -> tuple[str, ...]:
    """Return the tensors that the source says were written, if `write` is called while it publishes."""
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, buffer.handle)
    with monkeypatch.context() as patched:
        patched.setattr(source, "_confirmed", Written(source, write))
        found = source.publish(True).written
    assert not source.publish(True).written
    source.close()
    buffer.close()
    return found


@pytest.mark.parametrize("write", [counted, uncounted, foreign])
@pytest.mark.parametrize("name", ["block.0.weight", "head.weight"], ids=["as_it_is", "cast"])
def test_tensors_are_named(name: str, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    source = make_source(model)
    assert isinstance(source, TensorSource)
    plan = plan_for([source.layout()])
    found = written(source, plan, lambda: write(model.get_parameter(name)), monkeypatch)
    assert found == (name,)


def test_a_merged_weight_is_named_if_its_adapter_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    source = make_source(model, merge="default")
    assert isinstance(source, TensorSource)
    plan = plan_of(source.layout(), dtype="float32")
    a = lora(model, "layers.1.up_proj", "A")
    found = written(source, plan, lambda: uncounted(a), monkeypatch)
    assert found == ("layers.1.up_proj.weight",)


def test_an_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    source = LoraSource(model, "default")
    plan = plan_of(source.layout(), dtype="float32")
    b = lora(model, "layers.0.down_proj", "B")
    found = written(source, plan, lambda: uncounted(b), monkeypatch)
    assert found == ("layers.0.down_proj.lora_B.weight",)


def test_a_quantised_weight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(128, 256, bias=False))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    source = make_source(model, quantization=config)
    assert isinstance(source, TensorSource)
    plan = plan_for([source.layout()], bucket_bytes=1 << 16)
    found = written(source, plan, lambda: uncounted(model[0].weight), monkeypatch)
    assert found
    assert {name.removeprefix("0.") for name in found} <= {"weight", "weight_scale_inv"}


def test_offloaded_weights_are_named_until_they_are_offloaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    source = make_source(model, offloads=True)
    assert isinstance(source, TensorSource)
    plan = plan_for([source.layout()])
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, buffer.handle)
    with monkeypatch.context() as patched:
        patched.setattr(source, "_confirmed", Written(source, lambda: uncounted(model.embed.weight)))
        source.offload()
    assert source.publish(True).written == ("embed.weight",)
    source.onload()
    source.offload()
    assert not source.publish(True).written
    source.close()
    buffer.close()


def lora(model: nn.Module, path: str, kind: str) -> torch.Tensor:
    return model.get_parameter(f"base_model.model.{path}.lora_{kind}.default.weight")
