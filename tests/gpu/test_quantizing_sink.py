"""Buckets quantised into live parameters in place have the bytes of the reference on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.quantised_rig import FORMATS, Rig, trained
from weightsync.memory.digests import tensor_digest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
def test_live_bytes_are_those_of_the_reference(name: str) -> None:
    rig = Rig(FORMATS[name], "cuda")
    assert rig.plan.num_buckets > 5
    kept = []
    for seed in (0, 1, 0):
        tensors, sink = trained(seed), rig.sink()
        kept.append(torch.empty(rig.tables.nbytes + seed, dtype=torch.uint8, device="cuda"))  # elsewhere
        rig.take(sink, tensors)
        sink.finish()
        wanted = [tensor_digest(tensors[meta.name], meta.shape) for meta in rig.plan.tensors]
        np.testing.assert_array_equal(sink.digests(), np.array(wanted, np.uint64))
        assert sink.live == rig.parameters.digest()
        assert rig.differ(tensors) == []
