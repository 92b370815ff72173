"""Quantised bytes are those of the libraries that made each format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quantised import by_library, check_declared, same_bits, weights
from weightsync.memory.quantize import quantize
from weightsync.plan.formats import Format

BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "group": (1, 8), "block": (4, 8)}
CASES = [
    *(("int8", strategy, False, True) for strategy in BLOCKS),
    *(("float8_e4m3fn", strategy, False, True) for strategy in BLOCKS),
    *(
        (values, strategy, True, symmetric)
        for values in ("int4", "int8")
        for strategy in ("channel", "group")
        for symmetric in (True, False)
    ),
]


@pytest.mark.parametrize(("values", "strategy", "packed", "symmetric"), CASES)
@given(data=st.data())
def test_bytes_are_those_of_compressed_tensors(
    values: str, strategy: str, packed: bool, symmetric: bool, data: st.DataObject
) -> None:
    pytest.importorskip("compressed_tensors")
    weight = data.draw(weights(in_groups=strategy == "group"))
    form = Format(
        rule="compressed-tensors",
        values=values,
        block=BLOCKS[strategy],
        packed=packed,
        symmetric=symmetric,
    )
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    wanted = by_library(weight, form, strategy)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert same_bits(tensor, wanted[name]), name
