"""The actor of a host's share of a checkpoint, called without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from weightsync.actors.checkpoints.checkpoint_shard import CheckpointShard
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Members, make_plan
from weightsync.plan.layout.layout import join_tables


def test_a_rank_that_attaches_after_a_publish_does_not_lose_its_digests(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    shard = CheckpointShard([str(tmp_path)], 0, 1, (), stored=False, draft=())
    try:
        shard.check()
        assert shard.read_share() == 0
        shard.read([])
        assert shard.read_share() == 1
        source = join_tables([shard.layout(rank, 2) for rank in range(2)])
        target = join_tables([shard.layout(0, 1)])
        members = Members(3, (0, 1), (("e", (2,)),))
        plan = make_plan(source, {"e": target}, members, bucket_bytes=256, max_staging_bytes=1 << 20)
        shard.attach(plan, 0, 2)
        report = shard.publish()
        shard.attach(plan, 1, 2)
        wanted = [tensor_digest(tensors[meta.name], meta.shape) for meta in plan.tensors]
        np.testing.assert_array_equal(shard.digests(), np.array(wanted, np.uint64))
        np.testing.assert_array_equal(report.fingerprint, fingerprint(shard.digests()))
    finally:
        shard.close()
