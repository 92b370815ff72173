"""Tells on which host a rank's process runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from weightsync.engines.rank.rank_process import this_host


@dataclass(frozen=True, slots=True)
class RankHost:
    """The host of a rank.

    Attributes:
        host: see `this_host`.
        node: Ray's id of the host; "" for a process that Ray did not start, such as a child of the engine's.
        address: the host's address as Ray knows it; "" without a `node`.
        pid: the id of the process.
    """

    host: str
    node: str = ""
    address: str = ""
    pid: int = 0

    @classmethod
    def here(cls) -> RankHost:
        """Return the host of this process."""
        ray = sys.modules.get("ray")  # it is not imported here: most engines do without it
        if ray is None or not ray.is_initialized():
            return cls(this_host(), pid=os.getpid())
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return cls(this_host(), node, address, os.getpid())
