"""Kernels for groups, as they are asked for. What they make is compared on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quantised import DTYPES, check_declared
from weightsync.memory import cuda
from weightsync.plan.layout.formats import Format
from weightsync.quantising.group_kernels import can_quantize_groups, quantize_groups

FORMS = [
    *(
        Format(rule="compressed-tensors", values=values, block=(1, 32), packed=True, symmetric=symmetric)
        for values in ("int4", "int8")
        for symmetric in (True, False)
    ),
    Format(rule="awq", values="int4", block=(1, 32), packed=True, symmetric=False),
    Format(rule="gptq", values="int4", block=(1, 32), packed=True),
    Format(rule="gptq", values="int8", block=(1, 0), packed=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_formats_kernels_exist_and_its_tensors_are_as_declared(
    form: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = list[str]()

    def launch(name: str, *_: Any) -> None:
        launched.append(name)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    weight = torch.ones(8, 96, dtype=dtype)
    check_declared(weight, form, dict(quantize_groups(weight, form)))
    source = (Path(cuda.__file__).parent / "kernels/kernels.cu").read_text()
    assert len(launched) == 2
    assert [name for name in launched if f"defined(KERNEL_{name})" not in source] == []
    assert not can_quantize_groups(weight, form)  # on a CPU
