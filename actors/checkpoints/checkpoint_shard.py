"""The actor that reads one host's share of a checkpoint into memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync.actors.ray.actor_class import actor_class
from weightsync.actors.ray.placement import threaded
from weightsync.faults import Fault, inject, set_faults
from weightsync.memory.kernels.fingerprints import publish_report
from weightsync.plan import Plan, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.handles import HostExport
from weightsync.protocol.log_level import log_level, use_log_level
from weightsync.protocol.messages import Digests, PublishReport
from weightsync.protocol.timing import PhaseClock
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore, Reading

_NUM_THREADS = 4  # `read` occupies one until it ends


class CheckpointShard:
    """Actor around a `CheckpointStore`: reads and serves one host's share of a checkpoint. Sees no GPU."""

    def __init__(
        self,
        files: Sequence[str],
        share: int,
        num_shares: int,
        exclude: Collection[str],
        stored: bool,
        draft: Sequence[str],
        level: str = "",
    ) -> None:
        """`level`: from which it logs, see `use_log_level`."""
        use_log_level(level)
        # Not in a runtime environment, for which Ray starts the process through another one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._given = files, share, num_shares, exclude, stored, draft
        self._source: CheckpointStore | None = None
        self._plan: Plan | None = None

    def check(self) -> tuple[Sequence[TensorMeta], Mapping[str, str]]:
        """Check the headers. Returns the checkpoint's tensors and their files.

        Raises as `CheckpointStore`.
        """
        self._source = CheckpointStore(*self._given)
        return self._source.tensors, self._source.origin

    def read(self, after: Sequence[ObjectRef[Any]]) -> Reading:
        """Read and digest the share. Starts when all of `after` have ended or failed."""
        if after:
            ray.wait([*after], num_returns=len(after))
        return self._checked.read()

    def read_share(self) -> float:
        """Return how much of the share has been read, from 0 to 1."""
        return self._checked.read_share()

    def layout(self, rank: int, num_ranks: int) -> LayoutTable:
        """Return the layout that rank `rank` of `num_ranks` on this host sends."""
        return LayoutTable.of(self._checked.layout(rank, num_ranks))

    def attach(self, plan: Plan, rank: int, num_ranks: int) -> tuple[str, int, HostExport]:
        """Return the plan's digest and number of tensors, and the memory that the rank's holder maps."""
        self._plan = plan
        return plan.digest(), len(plan.tensors), self._checked.export(rank, num_ranks)

    def publish(self) -> PublishReport:
        """Return fingerprints and counts for all ranks on this host."""
        clock = PhaseClock()
        with clock.phase("publish"):
            inject("publish")
            self._checked.require_unwritten()
            published = self._checked.published(self._attached_plan.tensors)
        return publish_report(published, self._attached_plan.frozen, clock.spans)

    def digests(self) -> Digests:
        """Return the digests for all ranks on this host, uint64[num_tensors]."""
        return self._checked.published(self._attached_plan.tensors).digests

    def close(self) -> None:
        """Free the memory now; the process takes a moment to end."""
        self._checked.close()

    def sync_set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults of this process, see `weightsync.faults.set_faults`."""
        set_faults(process, faults, seed)

    @property
    def _attached_plan(self) -> Plan:
        assert self._plan is not None, "attach() comes first"
        return self._plan

    @property
    def _checked(self) -> CheckpointStore:
        assert self._source is not None, "check() comes first"
        return self._source


def spawn_shard(
    node: str,
    files: Sequence[str],
    share: int,
    num_shares: int,
    exclude: Collection[str],
    stored: bool,
    draft: Sequence[str],
) -> ActorHandle[CheckpointShard]:
    """Start a CheckpointShard actor on host `node`.

    The actor reserves no resources and ends with the driver.
    """
    options = threaded(node, _NUM_THREADS)
    given = files, share, num_shares, exclude, stored, draft, log_level()
    return actor_class(CheckpointShard).options(**options).remote(*given)
