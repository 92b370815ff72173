"""What kernels keep beside parameters: found, and put back after a reload."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from weightsync.engines.loading.kernel_state import KernelState, VolatileBuffers, tensors_beside
from weightsync.engines.loading.live_digest import require_complete
from weightsync.errors import TransportError


@dataclass(slots=True)
class Scales:
    first: torch.Tensor
    others: list[torch.Tensor] = field(default_factory=list)


class Kernel:
    def __init__(self, scales: Scales) -> None:
        self.scales = scales


class Method:
    def __init__(self) -> None:
        self.kernel = Kernel(Scales(torch.empty(0)))
        self.module = torch
        self.itself = self


class Experts(nn.Module):
    """Its method reads scales by a configuration, as that of vLLM's experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 2), requires_grad=False)
        self.quant_method = Method()
        self.process()

    def process(self) -> None:
        self.quant_method.kernel = Kernel(Scales(self.scale, [self.scale.detach()[:2], torch.arange(4)]))

    def reload(self, values: torch.Tensor) -> None:
        """Process new memory, then copy it into the parameter, as vLLM's reload does."""
        live = self.scale
        self.scale = nn.Parameter(values.clone(), requires_grad=False)
        self.process()
        live.data.copy_(self.scale)
        self.scale = live


@pytest.fixture
def experts() -> Experts:
    return Experts()


@pytest.fixture
def model(experts: Experts) -> nn.Module:
    return nn.Sequential(experts)


def test_kernels_that_refer_to_parameters_alone_keep_nothing_beside(model: nn.Module) -> None:
    assert [*tensors_beside(model)] == []
    require_complete(model)


def test_what_a_reload_leaves_in_kernels_is_named(model: nn.Module, experts: Experts) -> None:
    experts.reload(torch.ones(4, 2))
    assert "0.quant_method.kernel.scales.first" in [*tensors_beside(model)]
    with pytest.raises(TransportError, match=r"0\.quant_method\.kernel\.scales\S+ is no parameter"):
        require_complete(model)


def test_a_tensor_that_a_kernel_made_of_weights_is_named(model: nn.Module, experts: Experts) -> None:
    experts.quant_method.kernel.scales.others = [experts.scale.sum()]
    assert [*tensors_beside(model)] == ["0.quant_method.kernel.scales.others.0"]
    assert KernelState.of_references(model) is None


def test_kernels_read_live_parameters_again_once_their_state_is_put_back(
    model: nn.Module, experts: Experts
) -> None:
    state = KernelState.of_references(model)
    assert state is not None
    experts.reload(torch.ones(4, 2))
    vars(experts.quant_method)["num_reloads"] = 1
    state.put_back()
    assert [*tensors_beside(model)] == []
    assert not hasattr(experts.quant_method, "num_reloads")
    experts.scale.data.fill_(2)
    assert experts.quant_method.kernel.scales.first.eq(2).all()


def test_volatile_buffers_are_so_after_a_reload_that_registers_them_again() -> None:
    """A module whose cache counted as a weight could not be filled from a copy of its parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Module())
    for name, persistent in (("cache", False), ("gone", False), ("steps", True)):
        model[1].register_buffer(name, torch.ones(4), persistent=persistent)
    volatile = VolatileBuffers(model)
    for name in ("cache", "steps"):
        model[1].register_buffer(name, torch.ones(4))
    del model[1].gone
    with pytest.raises(TransportError, match=r"1\.cache is no parameter"):
        require_complete(model)
    volatile.put_back()
    assert model[1]._non_persistent_buffers_set == {"cache"}
    del model[1].steps
    require_complete(model)
