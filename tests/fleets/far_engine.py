"""An engine that says that it is on another host."""

from __future__ import annotations

from dataclasses import replace

from tests.fleets.actors import Engine
from weightsync.actors.ray.placement import Placement


class Far(Engine):
    """Says that it is on another host, which has another weightsync."""

    async def sync_placements(self, *fetched: object) -> list[Placement]:
        return [
            replace(each, node="far", address="192.0.2.9", versions={**each.versions, "weightsync": "9.0.1"})
            for each in await super().sync_placements(*fetched)
        ]
