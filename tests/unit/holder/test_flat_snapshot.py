"""An engine rank's live buffers as one run of bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.holder.flat_snapshot import FlatSnapshot


@given(sizes=st.lists(st.integers(0, 5), max_size=8), data=st.data())
def test_any_part_is_read_and_written(sizes: list[int], data: st.DataObject) -> None:
    live = {
        f"{number}": torch.randint(0, 256, (size,), dtype=torch.uint8) for number, size in enumerate(sizes)
    }
    flat, nbytes = FlatSnapshot(live), sum(sizes)
    whole = torch.cat([torch.empty(0, dtype=torch.uint8), *live.values()])
    assert flat.nbytes == nbytes
    first = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(first, nbytes))

    found = torch.zeros(end - first, dtype=torch.uint8)
    flat.copy_to(found, first)
    assert torch.equal(found, whole[first:end])

    whole[first:end] = torch.randint(0, 256, (end - first,), dtype=torch.uint8)
    flat.load(whole[first:end], first)
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.uint8), *live.values()]), whole)
