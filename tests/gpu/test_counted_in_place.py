"""NaN and Inf in weights that are read in place on a GPU: counted as torch counts them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from weightsync.errors import MovedError, PlanError, StateError
from weightsync.plan import Layout, Members, Plan, make_plan
from weightsync.sources.module import ModuleSource

pytestmark = pytest.mark.gpu


class Weights(nn.Module):
    """Many small tensors and a large one, of several dtypes; one empty, one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            for i in range(50):
                self.register_buffer(f"{name}_{i}", torch.randn(33, 17, device="cuda").to(dtype))
        self.register_buffer("large", torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))
        self.register_buffer("counts", torch.full((9,), -1, device="cuda"))


def attached(model: nn.Module) -> tuple[ModuleSource, Plan]:
    """Return a source of `model` that is read in place, and the plan."""
    source = ModuleSource(model)
    layout = Layout.from_ranks([source.layout()])
    members = Members(1, (0,), (("e0", (0,)),))
    plan = make_plan(layout, {"e0": layout}, members, bucket_bytes=1 << 20, max_staging_bytes=1 << 30)
    source.attach(plan, 0, None)
    return source, plan


def test_what_is_read_in_place_is_counted_by_name() -> None:
    model = Weights()
    source, _ = attached(model)
    whole = source.publish(True)
    assert whole.nonfinite == {}
    model.large[3, 5] = float("nan")
    model.float16_7[:, 2] = float("inf")
    model.float64_49[32, 16] = float("-inf")
    published = source.publish(True)
    assert published.nonfinite == {"large": 1, "float16_7": 33, "float64_49": 1}
    assert int((published.digests != whole.digests).sum()) == 3
    assert source.publish(False).nonfinite == {}
    source.close()


def test_weights_without_memory_are_refused_and_the_gpu_can_be_used_on() -> None:
    model = Weights()
    source, plan = attached(model)
    before = source.publish(True).digests
    storage, kept = model.large.untyped_storage(), model.large.clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    assert source.ready(), "torch's cache has the memory: it is allocated, and may be read"
    with pytest.raises((MovedError, PlanError, StateError), match="large"):
        source.publish(True)
    torch.cuda.empty_cache()
    for refused in (source.ready, source.ready, partial(source.publish, True)):
        with pytest.raises((MovedError, PlanError, StateError), match="large"):
            refused()
    torch.cuda.synchronize()
    storage.resize_(nbytes)
    model.large.copy_(kept)
    source.close()
    source.layout()
    source.attach(plan, 0, None)
    assert (source.publish(True).digests == before).all()
    source.close()
