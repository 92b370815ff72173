"""NaN and Inf in weights: counted as torch counts them, and warned of, refused or left alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.fleets.loop import CONFIG, Loop, drive
from tests.integration.test_controller import read_in_place as make_in_place
from weightsync.driver.engine_state import EngineState
from weightsync.errors import NonfiniteError
from weightsync.memory.kernels.nonfinite import MASKS, NonfiniteTable, count_nonfinite, word_mask
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore


def wanted(data: torch.Tensor) -> int:
    """By torch, which knows no `isfinite` of a float8."""
    wide = data.to(torch.float32) if data.itemsize == 1 and data.is_floating_point() else data
    return int((~torch.isfinite(wide)).sum())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_every_value_of_a_small_dtype_is_told_as_torch_tells_it(dtype: str) -> None:
    kind = getattr(torch, dtype)
    words = np.arange(1 << (8 * kind.itemsize), dtype=np.uint16).astype(f"u{kind.itemsize}")
    values = torch.from_numpy(words.view(f"i{kind.itemsize}")).view(kind)
    assert count_nonfinite(values) == wanted(values) > 0
    assert all(count_nonfinite(value.reshape(1)) == wanted(value) for value in values[::97])


@given(
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    values=st.lists(st.floats(width=16) | st.sampled_from([3.4e38, 1e-45, 1.7e308]), max_size=40),
    start=st.integers(0, 9),
    repeat=st.sampled_from([1, 700]),
)
def test_any_part_of_any_buffer_is_counted_to_its_first_and_last_byte(
    dtype: str, values: list[float], start: int, repeat: int
) -> None:
    nan = float("nan")
    data = torch.tensor(values * repeat, dtype=torch.float64).to(getattr(torch, dtype))
    around = torch.full((len(data) + 40,), nan).to(data.dtype)
    around[start : start + len(data)] = data
    memory = around.view(torch.uint8)
    memory = memory[: len(memory) // 8 * 8]
    counts = np.full(1, -1)
    size = data.itemsize
    NonfiniteTable([(dtype, start * size, len(data) * size)]).count(memory, counts, 0, 1)
    assert counts[0] == count_nonfinite(data) == wanted(data)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
)
def test_whole_numbers_are_all_finite(dtype: torch.dtype) -> None:
    data = torch.full((99,), -1, dtype=torch.int64).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert name not in MASKS
    counts = np.full(1, -1)
    NonfiniteTable([(name, 0, 8)]).count(torch.full((8,), 255, dtype=torch.uint8), counts, 0, 1)
    assert counts[0] == count_nonfinite(data) == 0


@pytest.mark.parametrize("dtype", MASKS)
def test_the_mask_of_a_digests_word_is_all_set_in_nan_and_inf(dtype: str) -> None:
    """A float64's upper word is the second of two."""
    worst = [value for value in (float("nan"), float("inf")) if value != float("inf") or "e4m3" not in dtype]
    words = torch.tensor(worst, dtype=torch.float64).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    size = min(MASKS[dtype].bit_length() + 7 >> 3, 4)
    upper = words.reshape(len(worst), -1)[:, -size:]
    assert all(
        int.from_bytes(word.tobytes(), "little") & word_mask(dtype) == word_mask(dtype) for word in upper
    )
    assert word_mask("int32") == word_mask("bool") == 0


@torch.no_grad()
def spoil(loop: Loop) -> None:
    loop.model[1].weight[2, 3] = float("nan")  # type: ignore[index, operator]
    loop.model[1].weight[0, 0] = float("-inf")  # type: ignore[index, operator]
    loop.model[0].bias[1] = float("inf")  # type: ignore[index, operator]


FOUND = {"1.weight": 2, "0.bias": 1}


def test_by_default_one_warning_names_the_tensors_and_the_report_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        assert (await loop.controller.update(1)).nonfinite == {}
        assert "NaN" not in caplog.text
        spoil(loop)
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        assert report.nonfinite == report.to_dict()["nonfinite"] == FOUND
        (warning,) = (each.getMessage() for each in caplog.records if "NaN" in each.getMessage())
        assert warning == "[driver] version 2: NaN or Inf in 0.bias (1), 1.weight (2), elements counted"

    with caplog.at_level(logging.WARNING):
        drive(work)


@pytest.mark.parametrize("in_place", [False, True])
def test_refused_weights_leave_every_engine_serving_what_it_had(in_place: bool) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        if in_place:  # then engines pause beside publishing
            make_in_place(loop)
        good = loop.model[1].weight.detach().clone()  # type: ignore[union-attr]
        spoil(loop)
        with pytest.raises(NonfiniteError, match=r"version 2: NaN or Inf in 0\.bias \(1\), 1\.weight \(2\)"):
            await loop.controller.update(2)
        assert [member.record.state for member in loop.fleet.engines.values()] == [EngineState.SERVING] * 2
        for engine in loop.engines.values():
            assert engine.serving() == 1
            assert torch.equal(engine.tensors["1.weight"], good)
        loop.train()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work, replace(CONFIG, nonfinite="refuse"))


def test_ignored_weights_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        spoil(loop)
        assert (await loop.controller.update(1)).nonfinite == {}
        assert "NaN" not in caplog.text

    drive(work, replace(CONFIG, nonfinite="ignore"))


def test_what_becomes_infinite_in_the_engines_dtype_counts() -> None:
    async def work(loop: Loop) -> None:
        for engine in loop.engines.values():
            engine.tensors = {name: tensor.half() for name, tensor in engine.tensors.items()}
        await loop.controller.connect()
        with torch.no_grad():
            loop.model[1].weight[2, 3] = 1e5  # type: ignore[index, operator]
        assert (await loop.controller.update(1)).nonfinite == {"1.weight": 1}

    drive(work)


def test_a_checkpoints_are_counted_in_the_dtype_that_is_sent(tmp_path: Path) -> None:
    weights = {"a": torch.tensor([[1e5, float("nan"), 3.0]]), "b": torch.ones(3, dtype=torch.int64)}
    save_file(weights, tmp_path / "model.safetensors")
    source = CheckpointStore([str(tmp_path)])
    source.read()
    assert source.published(source.tensors).nonfinite == {"a": 1}
    half = [replace(meta, dtype="float16") if meta.name == "a" else meta for meta in source.tensors]
    assert source.published(half).nonfinite == source.published(half).nonfinite == {"a": 2}
    source.close()
