"""A quantised engine in whose weights a bit flips."""

from __future__ import annotations

import torch

from weightsync import EngineActor
from weightsync.engines import whole_sink
from weightsync.engines.live_digest import live_digest
from weightsync.protocol.messages import LiveDigest


class FlippedEngine(EngineActor):
    """An engine that can flip a bit of its packed weights after they were loaded, before it digests them."""

    async def flip(self, times: int) -> None:
        """Flip one in each of the next loads."""
        left = iter(range(times))

        def flip_and_digest(model: torch.nn.Module, device: torch.device) -> LiveDigest:
            if next(left, None) is not None:
                packed = next(each for name, each in model.named_parameters() if "weight_packed" in name)
                packed.data.view(-1)[5] ^= 1 << 9
            return live_digest(model, device)

        whole_sink.live_digest = flip_and_digest
