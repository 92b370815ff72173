"""Digests of a holder's copies, to tell a damaged copy from a broken engine."""

from __future__ import annotations

from weightsync.holder.snapshots import SnapshotStore
from weightsync.holder.staging import Staging
from weightsync.holder.trainer_parts import copied_parts, digest_parts
from weightsync.memory.kernels.digests import tensor_digests
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Plan
from weightsync.protocol.messages import Digests, SnapshotHeader


def copy_digests(
    plan: Plan | None, staging: Staging | None, store: SnapshotStore, header: SnapshotHeader | None
) -> Digests | None:
    """Digest a copy again: the fingerprint of a trainer rank's part, or `FlatSnapshot.digests`.

    Without a `header`, digest the engine rank's memory. Returns None if it is not here, or if the copy's
    header is damaged.
    """
    if header is None:
        flat = staging.mapped.flat if staging and staging.mapped else None
        return flat.digests() if flat else None
    held = store.own(header)
    if held is None or plan is None:
        return None
    if header.layout != plan.content():
        return tensor_digests([held.bytes])
    return fingerprint(digest_parts(plan, copied_parts(plan, header.part, held.bytes)))
