"""Where what a refill reads goes: through the bucket slots, or straight to where it is served from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightsync.holder.bucket_consumers import Outlet
from weightsync.holder.flat_snapshot import EngineImage
from weightsync.holder.staging import Staging
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.transports import Pending

__all__ = ["ImageIntake", "Intake", "Portion", "SlotIntake"]

_NUM_PORTIONS = 4
"""Of one bucket of an image: they are read from as many peers, if there are as many."""


@dataclass(frozen=True, slots=True)
class Portion:
    """`nbytes` of a kept part from its byte `source` on, and their `offset` in the target."""

    part: int
    source: int
    offset: int
    nbytes: int


class Intake(Protocol):
    """Takes buckets in order, each out of `targets` in turn."""

    @property
    def num_buckets(self) -> int: ...

    @property
    def targets(self) -> Sequence[SharedBuffer]: ...

    def portions(self, bucket: int) -> Sequence[Portion]:
        """What a bucket is made of."""

    def wait_free(self, bucket: int) -> None:
        """Until the bucket's target may be written."""

    def land(self, bucket: int) -> None:
        """The bucket is whole in its target: begin to bring it where it goes."""

    def finish(self) -> None:
        """Until all is there, and the engine rank knows."""


class SlotIntake:
    """Into the slots, by the plan: the engine rank takes them as it does in an update."""

    def __init__(self, plan: Plan, staging: Staging, outlet: Outlet, timeout_s: float) -> None:
        self._plan, self._staging, self._outlet, self._timeout_s = plan, staging, outlet, timeout_s
        self.targets = staging.targets()

    @property
    def num_buckets(self) -> int:
        return self._plan.num_buckets

    def portions(self, bucket: int) -> Sequence[Portion]:
        steps = self._plan.bucket_steps(bucket)
        return [Portion(step.trainer, step.arena_offset, step.offset, step.nbytes) for step in steps]

    def wait_free(self, bucket: int) -> None:
        self._outlet.wait_free(bucket)

    def land(self, bucket: int) -> None:
        self._staging.put(bucket, self._timeout_s)
        self._outlet.offer(bucket)

    def finish(self) -> None:
        self._outlet.finish(self.num_buckets)


class ImageIntake:
    """Into the engine rank's live memory, of which part number `part` is the image."""

    def __init__(
        self, image: EngineImage, part: int, staging: Staging, outlet: Outlet, timeout_s: float
    ) -> None:
        self._image, self._part = image, part
        self._staging, self._outlet, self._timeout_s = staging, outlet, timeout_s
        self.targets = staging.targets()
        self._step = len(self.targets[0].tensor)
        self._landing: deque[Pending] = deque()

    @property
    def num_buckets(self) -> int:
        return -(-self._image.nbytes // self._step)

    def portions(self, bucket: int) -> Sequence[Portion]:
        first, nbytes = self._range(bucket)
        step = -(-nbytes // _NUM_PORTIONS)
        return [Portion(self._part, first + at, at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

    def wait_free(self, bucket: int) -> None:
        if len(self._landing) == len(self.targets):
            self._landing.popleft().wait()

    def land(self, bucket: int) -> None:
        first, nbytes = self._range(bucket)
        self._image.load(self.targets[bucket % len(self.targets)].tensor[:nbytes], first)
        self._landing.append(self._staging.mark(f"filling of bucket {bucket}", self._timeout_s))

    def finish(self) -> None:
        self._outlet.finish(0)

    def _range(self, bucket: int) -> tuple[int, int]:
        first = bucket * self._step
        return first, min(self._step, self._image.nbytes - first)
