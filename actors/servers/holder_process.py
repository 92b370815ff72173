"""The process of a holder beside a server. It ends with the server, and once the driver lets it go."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from weightsync.actors.servers.peers import ServedHolder
from weightsync.config import TlsFiles
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.errors import WeightSyncError
from weightsync.holder.holder import Holder
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node

logger = logging.getLogger("weightsync.holder")


def main() -> None:
    """Read settings and the offer of a place from stdin, and be that holder."""
    parent, settings, offer = msgspec.json.decode(
        sys.stdin.buffer.read(), type=tuple[int, dict[str, Any], NodeOffer]
    )
    if RankProcess.join(0, parent) is None:
        return  # the server has ended
    kinds = {"ports": tuple[int, int] | None, "tls": TlsFiles | None}
    settings |= {name: msgspec.convert(settings[name], kind) for name, kind in kinds.items()}
    holder = Holder(**settings)
    try:
        Node(offer, holder, ServedHolder).run()
    except WeightSyncError as error:
        logger.warning("[%s] ends: %s", holder.name, error)
    finally:
        holder.close()


if __name__ == "__main__":
    main()
