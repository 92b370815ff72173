"""What is added to the weights of DeepSpeed's engine where a LoRA adapter is merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.sources.test_lora import adapted
from weightsync.memory.tensors import meta_of, named_tensors, segment_view
from weightsync.plan import RankLayout
from weightsync.plan.layout.runs import run_segments
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.merged import Merged

pytest.importorskip("peft")


def merged(model: Any) -> dict[str, torch.Tensor]:
    """Merge runs of each tensor, which begin and end within rows, and put them together."""
    tensors, tied = named_tensors(model)
    metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
    found: dict[str, torch.Tensor] = {}
    for rank in range(3):
        runs, segments = {}, []
        for meta in metas:
            size = -(-meta.numel // 3)
            start, stop = min(rank * size, meta.numel), min((rank + 1) * size, meta.numel)
            runs[meta.name] = tensors[meta.name].detach().flatten()[start:stop].clone()
            segments += run_segments(meta, start, stop, meta.name)
        transform = Merged("default")
        weights = transform.apply(model, LocalWeights(RankLayout(metas, tuple(segments), tied), runs))
        transform.run(model, runs)
        shapes = {meta.name: meta.shape for meta in weights.layout.tensors}
        for each in weights.layout.segments:
            if each.buffer in weights.computed:
                whole = found.setdefault(each.buffer, torch.empty(shapes[each.tensor]))
                whole[each.box.slices()] = segment_view(weights.computed[each.buffer], each)
    return found


def test_what_peft_has_merged_already_is_not_added_twice() -> None:
    model: Any = adapted()
    apart = merged(model)
    model.merge_adapter()
    found = merged(model)
    assert found.keys() == apart.keys()
    for name, value in apart.items():
        assert torch.equal(found[name], model.get_parameter(name.removesuffix(" merged")))
        torch.testing.assert_close(found[name], value)
