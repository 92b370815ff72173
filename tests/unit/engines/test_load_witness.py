"""What a load did not fill still has the pattern, whatever the loader says."""

from __future__ import annotations

import pytest
import torch

from weightsync.engines.loading.load_witness import LoadWitness

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WITH_NAN = [*FLOATS, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*WITH_NAN, torch.int8, torch.uint8])
def test_what_was_not_loaded_is_named(dtype: torch.dtype) -> None:
    live = {name: torch.zeros(3, 4).to(dtype) for name in ("loaded", "left")}
    witness = LoadWitness(live)
    live["loaded"].copy_(torch.ones(3, 4).to(dtype))
    assert witness.left(live) == ["left"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_float_that_was_not_loaded_is_enough(dtype: torch.dtype) -> None:
    live = {"w": torch.zeros(3, 4, dtype=dtype).t()}
    witness = LoadWitness(live)
    live["w"][:, :2] = 1
    live["w"][:3, 2] = 1
    assert witness.left(live) == ["w"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_trainers_own_nan_was_loaded(dtype: torch.dtype) -> None:
    live = {"w": torch.zeros(2, dtype=dtype)}
    witness = LoadWitness(live)
    live["w"].copy_(torch.tensor([float("nan"), -float("nan")], dtype=dtype))
    assert witness.left(live) == []


def test_new_tensors_and_empty_ones_are_not_asked() -> None:
    witness = LoadWitness({"packed": torch.empty(0), "flags": torch.ones(2, dtype=torch.bool)})
    assert witness.left({"packed": torch.empty(0), "new": torch.empty(2)}) == []
