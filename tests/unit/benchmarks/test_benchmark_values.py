"""What benchmarks write is what they find, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from benchmarks import values
from benchmarks.models import Tensor, model_of, rank_box
from benchmarks.values import Held, count_wrong, fill, poison, touch

STACKED = (Tensor("a.experts", (4, 6, 10), 0), Tensor("b.experts", (4, 6, 10), 0), Tensor("rest", (7, 3), 0))


@pytest.fixture(params=[37, 1 << 25], ids=["many chunks", "one"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """The parts of a rank whose last one of some tensors is smaller, or empty."""
    monkeypatch.setattr(values, "_CHUNK_NUMEL", request.param)
    boxes = [(tensor, rank_box(tensor, 3, 4)) for tensor in (*model_of("tiny", 0), *STACKED)]
    return [(tensor, box, torch.empty(box.extent, dtype=torch.bfloat16)) for tensor, box in boxes]


def test_each_element_tells_its_version_tensor_and_place(held: list[Held]) -> None:
    numel = sum(local.numel() for _, _, local in held)
    fill(held, 1)
    assert count_wrong(held, 1) == 0
    assert count_wrong(held, 2) > 0.9 * numel
    first, second = (local for tensor, _, local in held if tensor.name.endswith(".experts"))
    assert (first != second).sum() > 0.9 * first.numel()
    rows = first[0, :2].clone()
    first[0, :2] = rows.flip(0)
    assert 0 < count_wrong(held, 1) <= 20
    first[0, :2] = rows
    assert count_wrong(held, 1) == 0
    poison(local for _, _, local in held)
    assert count_wrong(held, 1) == numel
    assert all((local.view(torch.uint8) == 0xFF).all() for _, _, local in held)


def test_a_fraction_of_all_elements_changes_and_is_found_again(held: list[Held]) -> None:
    large = Tensor("large", (300, 500))
    held = [*held, (large, rank_box(large, 0, 1), torch.empty(large.shape, dtype=torch.bfloat16))]
    fill(held, 1)
    before = held[-1][2].view(torch.int16).clone()
    touch(held, 2, 0.05)
    changed = held[-1][2].view(torch.int16) != before
    assert 0.045 < changed.float().mean() < 0.055
    gaps = changed.flatten().nonzero().diff(dim=0).float()
    assert 15 < gaps.std() < 25, "random places: as many as the mean gap"
    touch(held, 3, 0.3)
    assert count_wrong(held, 1, {2: 0.05, 3: 0.3}) == 0
    assert count_wrong(held, 1, {2: 0.05}) == pytest.approx(0.3 * sum(x.numel() for *_, x in held), rel=0.1)
    held[-1][2][7, 8] += 1
    assert count_wrong(held, 1, {2: 0.05, 3: 0.3}) == 1
