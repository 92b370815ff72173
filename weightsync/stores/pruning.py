"""Removes versions that no follower needs, and objects that no version names."""

from __future__ import annotations

from datetime import timedelta

from weightsync.stores.history import History
from weightsync.stores.manifest import OBJECTS, manifest_name
from weightsync.stores.object_store import Listed, ObjectStore
from weightsync.stores.routes import first_needed

_UPLOAD_TIME = timedelta(hours=1)


def prune(store: ObjectStore, keep: int) -> tuple[int, int]:
    """Remove what no follower of the last `keep` versions needs. Returns the numbers of versions and objects.

    Objects that no version names may belong to an upload. They are removed once they are an hour older than
    the newest version.
    """
    history = History(store)
    if not history.newest:
        return 0, 0
    first = first_needed(history.require(history.versions[-keep:][0]), history.find)
    gone = [version for version in history.versions if version < first]
    store.delete(map(manifest_name, gone))
    left = [history.require(version) for version in history.versions if version >= first]
    named = {stored.name for manifest in left for stored in manifest.objects}
    there = store.list(OBJECTS).items()
    unnamed = [name for name, listed in there if name not in named and is_left_over(listed, history)]
    store.delete(unnamed)
    return len(gone), len(unnamed)


def is_left_over(listed: Listed, history: History) -> bool:
    """Return True if `prune` removes this object when no version names it."""
    newest = history.newest_listed
    return newest is not None and listed.written < newest.written - _UPLOAD_TIME
