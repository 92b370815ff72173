"""The commands ``weightsync publish`` and ``weightsync follow``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from weightsync.actors.progress import byte_bar
from weightsync.errors import WeightSyncError
from weightsync.sources.checkpoint.safetensors_files import contents
from weightsync.stores.following import follow
from weightsync.stores.history import History
from weightsync.stores.local_folder import LocalFolder, default_folder
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.pruning import prune
from weightsync.stores.publishing import publish
from weightsync.text import count_text, size_text, time_text

Say = Callable[[str], None]


def publish_folder(
    folder: Path, url: str, copy: Path | None, keep: int | None, say: Say, *, anchor: bool
) -> None:
    """Publish a checkpoint's folder, then prune. Raises as `publish`, and as `contents` for its files."""
    contents([str(folder)])
    store, began = ObjectStore(url, make=True), time.monotonic()
    local = LocalFolder(copy or default_folder(url, "published"))
    with byte_bar("publish") as tell:
        made = publish(store, folder, local, anchor=anchor, tell=tell)
    kind = "an anchor" if made.is_anchor else "a delta"
    took = f"{size_text(made.nbytes)} uploaded in {time_text(time.monotonic() - began)}"
    what = f"{kind}, {took}" if made.is_new else "it has the same files, so nothing is uploaded"
    say(f"version {made.version}: {what}")
    if keep is not None:
        versions, objects = prune(store, keep)
        say(f"removed {count_text(versions, 'version')} and {count_text(objects, 'object')}")


def follow_store(
    url: str, folder: Path, version: int | None, say: Say, *, once: bool, every_s: float
) -> None:
    """Keep a folder at the newest version of a store, or bring it to `version`. Raises as `follow`.

    Once the folder has been at a version of the store, errors are told, and it is tried again.
    """
    store, local = ObjectStore(url), LocalFolder(folder)
    reached: Path | None = None
    told = ""
    while True:
        try:
            if once or version or reached or History(store).newest:
                reached, told = _step(store, local, version, say, reached), ""
            elif not told:
                say(told := f"{url} has no version yet")
        except WeightSyncError as error:  # a full disk, too, may have space later
            if not reached:
                raise
            if str(error) != told:
                say(told := str(error))
        if once or version:
            return
        time.sleep(every_s)


def _step(
    store: ObjectStore, local: LocalFolder, version: int | None, say: Say, reached: Path | None
) -> Path:
    """Follow, and tell of files that are new since `reached`, their folder before. Returns their folder."""
    began = time.monotonic()
    with byte_bar("follow") as tell:
        found = follow(store, local, version, tell)
    if found.files != reached or found.nbytes:
        took = time_text(time.monotonic() - began)
        say(f"version {found.version}: {size_text(found.nbytes)} downloaded in {took}; {local.current}")
    return found.files
