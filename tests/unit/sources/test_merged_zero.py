"""What is added to the weights of DeepSpeed's engine where a LoRA adapter is merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.sources.test_lora import adapted
from weightsync.memory.tensors import meta_of, named_tensors
from weightsync.plan import RankLayout, Segment
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.merged_weights import MergedWeights
from weightsync.sources.lora.merged_zero import _merge

pytest.importorskip("peft")


def merged(model: Any) -> dict[str, torch.Tensor]:
    weights = MergedWeights("default")
    tensors, tied = named_tensors(model)
    metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
    layout = RankLayout(metas, tuple(map(Segment.whole, metas)), tied)
    weights.of(model, LocalWeights(layout, tensors))
    for target in weights.targets(model):
        with torch.no_grad():
            _merge(target)
    return {name: each.clone() for name, each in weights.buffers().items()}


def test_what_peft_has_merged_already_is_not_added_twice() -> None:
    model: Any = adapted()
    apart = merged(model)
    model.merge_adapter()
    found = merged(model)
    assert found.keys() == apart.keys()
    for name, value in apart.items():
        assert torch.equal(found[name], model.get_parameter(name.removesuffix(" merged")))
        torch.testing.assert_close(found[name], value)
