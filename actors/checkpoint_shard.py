"""A process that holds one host's share of one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.faults import inject, set_faults
from weightsync.protocol.timing import PhaseClock, Span
from weightsync.sources.checkpoint import CheckpointSource, Reading

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.plan import Plan, RankLayout, TensorMeta
    from weightsync.protocol.handles import HostExport
    from weightsync.protocol.messages import Published

__all__ = ["CheckpointShard", "spawn_shard"]

_NUM_THREADS = 4  # `read` has one for as long as it takes


class CheckpointShard:
    """See `CheckpointSource`."""

    def __init__(self, files: Sequence[str], share: int, num_shares: int, exclude: Collection[str]) -> None:
        self._given = files, share, num_shares, exclude
        self._source: CheckpointSource | None = None
        self._tensors: Sequence[TensorMeta] = ()

    def check(self) -> tuple[Sequence[TensorMeta], Mapping[str, str]]:
        """The checkpoint's tensors, and the file that each is in. Raises as `CheckpointSource`."""
        self._source = CheckpointSource(*self._given)
        return self._source.tensors, self._source.origin

    def read(self, after: Sequence[ObjectRef[Any]]) -> Reading:
        """See `CheckpointSource.read`; begins when `after` have ended, well or not."""
        if after:
            ray.wait([*after], num_returns=len(after))
        return self._checked.read()

    def layout(self, rank: int, num_ranks: int) -> RankLayout:
        """See `CheckpointSource.layout`."""
        return self._checked.layout(rank, num_ranks)

    def attach(self, plan: Plan, rank: int, num_ranks: int) -> tuple[str, HostExport]:
        """The plan's digest as computed here, and where the rank's holder finds what it sends."""
        self._tensors = plan.tensors
        return plan.digest(), self._checked.export(rank, num_ranks)

    def publish(self) -> tuple[Published, Sequence[Span]]:
        """What was read, of all ranks on this host."""
        clock = PhaseClock()
        with clock.phase("publish"):
            inject("publish")
            published = self._checked.published(self._tensors)
        return published, clock.spans

    def close(self) -> None:
        """See `CheckpointSource.close`: the process takes a moment to end."""
        self._checked.close()

    def sync_set_faults(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `weightsync.faults.set_faults`."""
        set_faults(who, faults, seed)

    @property
    def _checked(self) -> CheckpointSource:
        assert self._source is not None, "check() comes first"
        return self._source


def spawn_shard(
    node: str, files: Sequence[str], share: int, num_shares: int, exclude: Collection[str]
) -> ActorHandle[CheckpointShard]:
    """A CheckpointShard actor on that host. It reserves nothing, sees no GPU and ends with its driver."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": _NUM_THREADS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
    }
    return ray.remote(CheckpointShard).options(**options).remote(files, share, num_shares, exclude)
