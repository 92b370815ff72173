"""The digest of live parameters, in the layout that kernels read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync.engines.live_digest import LiveParameters, require_complete
from weightsync.errors import TransportError

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.packed = _frozen(torch.randint(-100, 100, (6, 4), dtype=torch.int32, generator=draw))
        self.scale = _frozen(torch.rand(6, 2, generator=draw).to(torch.float8_e4m3fn))
        self.empty = _frozen(torch.empty(0))


class Cache(nn.Module):
    kv_cache_dtype = "auto"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.k_scale = _frozen(torch.tensor(scale))


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def model(cache: float = 1.0) -> nn.Module:
    return nn.Sequential(Layer(), Cache(cache))


def test_equal_parameters_have_equal_digests_whatever_the_scales_of_the_cache() -> None:
    assert LiveParameters(model(), CPU).digest() == LiveParameters(model(2.0), CPU).digest()


@pytest.mark.parametrize("name", ["packed", "scale"])
@pytest.mark.parametrize("bit", [0, 7])
def test_each_bit_counts(name: str, bit: int) -> None:
    first, other = model(), model()
    getattr(other[0], name).data.view(torch.uint8).view(-1)[3] ^= 1 << bit
    found, wanted = LiveParameters(other, CPU).digest(), LiveParameters(first, CPU).digest()
    assert found.kind == wanted.kind
    assert found.digest != wanted.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.view(4, 6),
        lambda tensor: tensor.t().contiguous().t(),
        lambda tensor: tensor.view(torch.float32),
    ],
    ids=["shape", "strides", "dtype"],
)
def test_another_layout_is_another_kind(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    other = model()
    other[0].packed = _frozen(change(other[0].packed.data))
    assert LiveParameters(other, CPU).digest().kind != LiveParameters(model(), CPU).digest().kind


def test_all_that_was_loaded_is_among_the_parameters() -> None:
    complete = model()
    complete[0].register_buffer("inverse_frequencies", torch.rand(4), persistent=False)
    complete[0].num_tokens = torch.arange(8)
    complete[0].limit = torch.tensor(448.0)
    complete[1].register_buffer("scales", torch.rand(2))
    complete[1].kv_cache = torch.zeros(2, 8)
    complete[0].turned = _frozen(torch.rand(6, 4).t())
    require_complete(complete)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda each: setattr(each[1], "W_UK_T", torch.rand(2, 2)), r"1\.W_UK_T is no parameter"),
        (lambda each: setattr(each[0], "packed8", torch.ones(2, dtype=torch.int8)), r"0\.packed8 is no"),
        (lambda each: each[0].register_buffer("bias", torch.rand(2)), r"0\.bias is no parameter"),
        (lambda each: setattr(each[0], "left", _frozen(torch.rand(6, 4)[:, :2])), r"0\.left has gaps"),
        (lambda each: setattr(each[0], "one", _frozen(torch.rand(1).expand(6))), r"0\.one has gaps, or elem"),
    ],
)
def test_what_copies_of_parameters_would_leave_out_is_named(
    spoil: Callable[[nn.Module], None], message: str
) -> None:
    spoilt = model()
    spoil(spoilt)
    with pytest.raises(TransportError, match=message):
        require_complete(spoilt)
