"""Filling an engine rank, from this host's memory where it is mapped: then nobody is asked."""

from __future__ import annotations

import time
from collections import deque

from weightsync.errors import ReadError, StateError, TransportError
from weightsync.faults import strike
from weightsync.holder.bucket_consumers import Outlet
from weightsync.holder.flat_snapshot import EngineImage
from weightsync.holder.refill import Refill
from weightsync.holder.refill_sink import ImageIntake, SlotIntake
from weightsync.holder.snapshots import Held, Keeper
from weightsync.holder.staging import Staging
from weightsync.plan import Plan
from weightsync.protocol.messages import Kept, Label, Refilled
from weightsync.transports import Pending

__all__ = ["Restore", "open_refill"]

_STEP_NBYTES = 256 << 20  # so often it can be stopped
_NUM_AHEAD = 2


class Restore:
    """From `held`, which is `label`, to the live memory that `image` is of."""

    def __init__(
        self,
        held: Held,
        label: Label,
        image: EngineImage,
        staging: Staging,
        outlet: Outlet,
        timeout_s: float,
    ) -> None:
        self._held, self._label, self._image = held, label, image
        self._staging, self._outlet, self._timeout_s = staging, outlet, timeout_s
        self._stopped = ""

    def run(self) -> Refilled:
        """Raises TransportError when it was stopped, DeadlineError when the device does not go on.

        ReadError when the holder that keeps it replaced it meanwhile.
        """
        begun = time.perf_counter()
        data = self._held.bytes
        firsts = range(0, len(data), _STEP_NBYTES)
        under_way: deque[Pending] = deque()
        for number, first in enumerate(firsts):
            strike("refill", bucket=number, num_buckets=len(firsts))
            if self._stopped:
                raise TransportError(self._stopped)
            self._image.load(data[first : first + _STEP_NBYTES], first)
            under_way.append(self._staging.mark(f"filling from byte {first} on", self._timeout_s))
            if len(under_way) > _NUM_AHEAD:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()
        who = self._held.holder
        if (found := self._held.label) != self._label:
            raise ReadError(who, f"it keeps {found or 'nothing now'}, not {self._label}")
        self._outlet.finish(0)
        return Refilled({who: len(data)}, {who: self._held.way}, time.perf_counter() - begun)

    def stop(self, cause: str) -> None:
        """End a `run`, from any thread."""
        self._stopped = cause

    def close(self) -> None:
        """It has nothing of its own."""


def open_refill(
    plan: Plan,
    kept: Kept,
    keeper: Keeper | None,
    staging: Staging,
    outlet: Outlet,
    direct: bool,
    timeout_s: float,
) -> Refill | Restore:
    """What brings `kept` to the engine rank; `keeper` is this holder's, if its memory may be read.

    Raises StateError when an image is kept, and the engine rank's memory is not written from here.
    """
    if not kept.is_image:
        return Refill(kept, SlotIntake(plan, staging, outlet, timeout_s), direct, timeout_s)
    if staging.image is None:
        raise StateError("this engine copies buckets by itself, so that no image of its memory can be used")
    (part,) = kept.parts
    label = Label(kept.version, kept.layout, part)
    if keeper and (held := keeper.held(label)):
        return Restore(held, label, staging.image, staging, outlet, timeout_s)
    return Refill(kept, ImageIntake(staging.image, part, staging, outlet, timeout_s), direct, timeout_s)
