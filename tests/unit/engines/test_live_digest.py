"""The digest of live parameters, in the layout that kernels read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from weightsync.engines.loading import live_digest
from weightsync.engines.loading.live_digest import EqualLoads, LiveParameters, require_complete
from weightsync.errors import StateError, TransportError
from weightsync.memory.tensors import meta_of
from weightsync.plan import Box, Segment
from weightsync.quantising.stored_places import StoredPlaces

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
    complete[0].register_buffer("_expert_map", torch.arange(8, dtype=torch.int32))
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
        (lambda each: each[0].register_buffer("map", torch.arange(2)), r"0\.map is no parameter"),
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


def with_places(module: nn.Module) -> LiveParameters:
    """Of the first three rows of the words, and all scales."""
    live = {name: parameter.detach() for name, parameter in module.named_parameters()}
    metas = [meta_of(name, live[name]) for name in ("0.packed", "0.scale")]
    boxes = Box((0, 0), (3, 4)), Box((0, 0), (6, 2))
    segments = [
        Segment(meta.name, box, meta.name, 0, Box.whole(meta.shape).strides(meta.itemsize))
        for meta, box in zip(metas, boxes, strict=True)
    ]
    parameters = LiveParameters(module, CPU)
    parameters.use(StoredPlaces(segments, live, metas, {}))
    return parameters


@pytest.mark.parametrize(("name", "at"), [("packed", 1), ("packed", -1), ("scale", 3)])
def test_each_bit_counts_of_what_is_stored_and_of_what_lies_beside_it(name: str, at: int) -> None:
    first, other = model(), model()
    getattr(other[0], name).data.view(torch.uint8).view(-1)[at] ^= 1
    found, wanted = with_places(other).digest(), with_places(first).digest()
    assert found.kind == wanted.kind != LiveParameters(first, CPU).digest().kind
    assert found.digest != wanted.digest


def test_digests_of_what_is_stored_may_be_given_and_follow_parameters_that_move() -> None:
    module = model()
    parameters, wanted = with_places(module), with_places(module).digest()
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    assert parameters.digest() == wanted
    module[0].packed.data[0, 0] += 1
    assert parameters.digest() != wanted
    given = np.zeros(2, np.uint64)
    assert parameters.digest(stored=given) != parameters.digest(stored=given + np.uint64(1))


def test_nothing_is_found_again_if_all_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    live = {name: parameter.detach() for name, parameter in module.named_parameters()}
    meta = meta_of("0.weight", live["0.weight"])
    places = StoredPlaces([Segment.whole(meta)], live, [meta], {})
    parameters = LiveParameters(module, CPU)
    parameters.use(places)
    parameters.find()
    monkeypatch.setattr(live_digest, "parameters_of", None)
    parameters.digest(is_found=True, stored=places.digests())


def test_an_equal_load_that_changes_live_bytes_is_refused() -> None:
    held = model()
    equal, given, other = EqualLoads(LiveParameters(held, CPU)), *np.eye(2, dtype=np.uint64)
    equal.require(given, None)
    equal.require(given, None)
    held[0].packed.data.add_(1)
    equal.require(other, None)
    held[0].packed.data.add_(1)  # packed once more
    for _ in range(2):  # also the next time: a refused load is no measure
        with pytest.raises(StateError, match="made other live bytes of the same tensors"):
            equal.require(other, None)
    held[0].packed.data.sub_(1)
    equal.require(other, None)


def test_loads_that_are_not_digested_pass() -> None:
    equal, given = EqualLoads(None), np.zeros(2, np.uint64)
    equal.require(given, None)
    equal.require(given, LiveParameters(model(), CPU).digest())
