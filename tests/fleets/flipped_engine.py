"""A quantised engine that flips a bit of its own weights."""

from __future__ import annotations

from typing import Any

from weightsync import EngineActor
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.protocol.messages import LiveDigest


class FlippedEngine(EngineActor):
    """An engine that can flip a bit of its packed weights after they were loaded, before it digests them."""

    async def flip(self, times: int) -> None:
        """Flip one in each of the next loads."""
        left, digest = iter(range(times)), LiveParameters.digest

        def flip_and_digest(live: LiveParameters, *given: Any) -> LiveDigest:
            if next(left, None) is not None:
                held = live.model.named_parameters()
                packed = next(each for name, each in held if "weight_packed" in name)
                packed.data.view(-1)[5] ^= 1 << 9
            return digest(live, *given)

        LiveParameters.digest = flip_and_digest  # type: ignore[method-assign]
