"""Filling an engine rank, from what its own holder keeps where it does: then nobody else is asked."""

from __future__ import annotations

import time
from collections import deque

import torch

from weightsync.errors import StateError, TransportError
from weightsync.faults import strike
from weightsync.image import EngineImage
from weightsync.intake import ImageIntake, SlotIntake
from weightsync.keeper import Keeper, Label
from weightsync.outlet import Outlet
from weightsync.plan import Plan
from weightsync.refill import Kept, Refill, Refilled
from weightsync.staging import Staging
from weightsync.transports import Pending

__all__ = ["Restore", "open_refill"]

_STEP_NBYTES = 256 << 20  # so often it can be stopped
_NUM_AHEAD = 2


class Restore:
    """From `held`, the image that holder `name` keeps, to the live memory that `image` is of."""

    def __init__(
        self,
        name: str,
        held: torch.Tensor,
        image: EngineImage,
        staging: Staging,
        outlet: Outlet,
        timeout_s: float,
    ) -> None:
        self._name, self._held, self._image = name, held, image
        self._staging, self._outlet, self._timeout_s = staging, outlet, timeout_s
        self._stopped = ""

    def run(self) -> Refilled:
        """Raises TransportError when it was stopped, DeadlineError when the device does not go on."""
        begun = time.perf_counter()
        firsts = range(0, len(self._held), _STEP_NBYTES)
        under_way: deque[Pending] = deque()
        for number, first in enumerate(firsts):
            strike("refill", bucket=number, num_buckets=len(firsts))
            if self._stopped:
                raise TransportError(self._stopped)
            self._image.load(self._held[first : first + _STEP_NBYTES], first)
            under_way.append(self._staging.mark(f"filling from byte {first} on", self._timeout_s))
            if len(under_way) > _NUM_AHEAD:
                under_way.popleft().wait()
        self._outlet.finish(0)
        return Refilled({self._name: len(self._held)}, {self._name: "own"}, time.perf_counter() - begun)

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
    """What brings `kept` to the engine rank; `keeper` is this holder's own, if that may be read.

    Raises StateError when an image is kept, and the engine rank's memory is not written from here.
    """
    if not kept.is_image:
        return Refill(kept, SlotIntake(plan, staging, outlet, timeout_s), direct, timeout_s)
    if staging.image is None:
        raise StateError("this engine copies buckets by itself, so that no image of its memory can be used")
    (part,) = kept.parts
    held = keeper.held(Label(kept.version, kept.layout, part)) if keeper else None
    if keeper is not None and held is not None:
        return Restore(keeper.name, held, staging.image, staging, outlet, timeout_s)
    return Refill(kept, ImageIntake(staging.image, part, staging, outlet, timeout_s), direct, timeout_s)
