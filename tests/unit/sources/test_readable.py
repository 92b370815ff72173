"""Tensors whose bytes are not their values are refused by name, and while trainers connect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.contract.source_ranks import plan_for, publish
from tests.unit.sources.test_quantized_module import FP8, Model
from weightsync.errors import PlanError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.sources import make_source
from weightsync.sources.module import ModuleSource
from weightsync.sources.readable import require_values


def holding(tensor: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("odd", tensor)
    return model


def without_memory() -> nn.Module:
    model = holding(torch.ones(4))
    model.get_buffer("odd").untyped_storage().resize_(0)
    return model


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(2), "weight: it is not initialised: run a batch through"),
    "sparse": (
        lambda: holding(torch.eye(2).to_sparse()),
        "odd: its layout is sparse_coo: replace it by a dense",
    ),
    "sparse rows": (
        lambda: holding(torch.eye(2).to_sparse_csr()),
        "odd: its layout is sparse_csr: replace it",
    ),
    "of MKL-DNN": (lambda: holding(torch.eye(2).to_mkldnn()), "odd: its layout is _mkldnn: replace it by"),
    "nested": (
        lambda: holding(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        "odd: its layout is nested: replace it by",
    ),
    "quantised": (
        lambda: holding(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        r"odd: it is quantised \(torch\.qint8\): replace it by its dequantize",
    ),
    "complex": (
        lambda: holding(torch.ones(2, dtype=torch.complex64)),
        "odd: unknown dtype 'complex64'; valid",
    ),
    "on no device": (lambda: nn.Linear(2, 2, device="meta"), "weight: it has no memory: load its values"),
    "without memory": (without_memory, "odd: it has no memory: load its values before"),
    "of two tensors": (
        lambda: holding(TwoTensor(torch.ones(2), torch.ones(2))),
        "odd: it is a TwoTensor, whose memory is not its values: replace it by a plain tensor",
    ),
    "negated": (
        lambda: holding(torch.ones(2, dtype=torch.complex64).conj().imag),
        "odd: it is a negated view: replace it by",
    ),
}
LEFT_OUT = ("on no device", "without memory", "of two tensors", "negated")


@pytest.mark.filterwarnings("ignore:.*(Sparse|prototype|quantized)")
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_read_is_named_while_it_connects(kind: str) -> None:
    make, says = ODD[kind]
    with pytest.raises(PlanError, match=f"^{says}"):
        make_source(make()).layout()


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_left_out_may_be_odd(kind: str) -> None:
    made = ODD[kind][0]()
    odd = ODD[kind][1].partition(":")[0]
    model: Any = nn.ModuleDict({"odd": made, "plain": nn.Linear(3, 3)})
    with pytest.raises(PlanError, match=rf"or leave it out by exclude=\['odd\.{odd}'\]$"):
        make_source(model).layout()
    exclude = ["odd.*"]
    assert {meta.name for meta in make_source(model, exclude).layout().tensors} == {
        "plain.weight",
        "plain.bias",
    }


def test_rows_that_are_quantised_on_the_way_are_looked_at() -> None:
    model = Model()
    model.up = nn.Linear(64, 10, bias=False, device="meta")
    with pytest.raises(PlanError, match=r"^up\.weight: it has no memory"):
        make_source(model, quantization=FP8).layout()


def test_a_tensor_on_another_device_is_named() -> None:
    class Far(torch.Tensor):
        device = torch.device("mps")  # type: ignore[assignment]

    source = ModuleSource(holding(torch.ones(2)))
    layout = source.layout()
    tensors = {segment.buffer: torch.ones(2) for segment in layout.segments}
    tensors["odd"] = torch.ones(2).as_subclass(Far)
    with pytest.raises(PlanError, match=r"^odd: it is on mps: move it to a CPU or an NVIDIA GPU"):
        require_values(layout, tensors)


def test_what_loses_its_memory_later_is_named_in_the_update() -> None:
    source = ModuleSource(holding(torch.ones(2)))
    plan = plan_for([source.layout()])
    assert publish(source, plan, 0)
    source.layout()
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, buffer.handle)
    source.model.to("meta")
    with pytest.raises(PlanError, match=r"^odd: it has no memory"):
        source.publish(True)
    source.close()
    buffer.close()


SHARING = {
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "overlapping": lambda: torch.arange(12.0).as_strided((3, 4), (2, 1)),
    "empty": lambda: torch.empty(0, 3),
    "every second": lambda: torch.arange(12.0)[::2],
}


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("kind", SHARING)
def test_tensors_in_any_strides_are_right(kind: str, offloads: bool) -> None:
    model = holding(SHARING[kind]())
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = ModuleSource(model, offloads=offloads)
    plan = plan_for([source.layout()])
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, buffer.handle)
    if offloads:
        source.offload()
        source.publish(True)
        source.onload()
    digests = source.publish(True).digests
    source.close()
    buffer.close()
    for meta, digest in zip(plan.tensors, digests, strict=True):
        assert torch.equal(model.state_dict()[meta.name], wanted[meta.name])
        assert digest == tensor_digest(wanted[meta.name], meta.shape)
