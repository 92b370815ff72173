"""Finds trainers that wrote their weights during an update, by digesting them again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_group import Rewritten
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.protocol.messages import Digests, Fingerprint, combine

logger = logging.getLogger("weightsync.driver")


async def rewritten(
    fleet: Fleet,
    connection: Connection,
    published: Mapping[str, Fingerprint],
    tables: Mapping[str, Digests],
    suspects: frozenset[str],
    timeout_s: float,
) -> Rewritten:
    """Compare the digests of trainers' memory, taken by holders now, with the published digests.

    Holders are asked, since a trainer that writes may be busy for long. A holder that does not answer within
    `timeout_s` seconds is skipped.

    Args:
        published: the trainers' fingerprints by name, in the order of ``fleet.trainers``.
        tables: the digests behind it. A trainer may be too busy to give them.
        suspects: tensors to report if the fingerprint of a trainer without a table differs.
    """
    calls = {
        name: fleet.holders[holder].digests()
        for name, (_, holder) in zip(published, fleet.trainers, strict=True)
    }
    outcome = await gather_named(calls, "verify", timeout_s)
    for name, error in outcome.failures.items():
        logger.warning("[%s] it is not known whether it wrote what was read: %s", name, error)
    found = outcome.answers
    if connection.checkpoint:  # one process per host publishes for all ranks of the host
        tables = {"another process": combine([*tables.values()])} if len(tables) == len(published) else {}
        published = {"another process": combine([*published.values()])}
        found = {"another process": combine([*found.values()])} if not outcome.failures else {}
    names = np.array([meta.name for meta in connection.plan.tensors])
    return {
        name: frozenset(names[digests != tables[name]].tolist()) if name in tables else suspects
        for name, digests in found.items()
        if (fingerprint(digests) != published[name]).any()
    }
