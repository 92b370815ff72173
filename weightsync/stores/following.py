"""Brings a local folder to a version of a store."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import StoreError
from weightsync.stores import tensor_file
from weightsync.stores.history import History
from weightsync.stores.local_folder import LocalFolder
from weightsync.stores.manifest import Manifest, Stored, manifest_name
from weightsync.stores.meter import Meter, Tell, silent
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.routes import Route, route
from weightsync.stores.threads import on_threads

logger = logging.getLogger("weightsync.stores")


@dataclass(frozen=True, slots=True)
class Followed:
    """Where a folder is, and the bytes that were downloaded for it.

    Attributes:
        files: the folder of the files of this version, also if another process switches to another version.
    """

    version: int
    nbytes: int
    files: Path


def follow(
    store: ObjectStore,
    folder: LocalFolder,
    version: int | None = None,
    tell: Tell = silent,
    *,
    checks: bool = False,
) -> Followed:
    """Bring `folder` to the newest version, or to `version`.

    If the call is interrupted or raises, readers of the folder see the version that they saw before, and the
    next call goes on with the objects that are here.

    Args:
        checks: hash the files also if readers see that version already.

    Raises:
        StoreError: the store does not have the version, or an object is missing, torn or damaged.
    """
    with folder.locked():
        history = History(store, folder.version)
        target = history.require(history.newest if version is None else version)
        nbytes = bring(store, folder, target, history, tell, checks)
        return Followed(target.version, nbytes, folder.files)


def bring(
    store: ObjectStore,
    folder: LocalFolder,
    target: Manifest,
    history: History,
    tell: Tell,
    checks: bool = False,
) -> int:
    """Bring a locked folder to `target`. Returns the bytes that were downloaded."""
    if folder.shows(target) and not checks:
        return 0
    routes, sources = _routes(store, folder, target, history)
    folder.tidy(sources | {file.content for file in target.files.values()})
    missing = [stored for stored in sources if not folder.has(stored)]
    meter = Meter(tell, sum(stored.nbytes for stored in missing))
    on_threads(lambda stored: _fetch(store, folder, stored, target.version, meter), missing)
    changed = {target.files[name].content: way for name, way in routes.items() if way.changes}
    on_threads(lambda made: _make(store, folder, target.version, *made), changed.items())
    folder.show(target)
    return meter.nbytes


def _routes(
    store: ObjectStore, folder: LocalFolder, target: Manifest, history: History
) -> tuple[dict[str, Route], set[Stored]]:
    """Return a way to each file, and the objects of all ways. Those that are here are undamaged."""
    routes = {name: _route(store, folder, name, target, history) for name in target.files}
    sources = {stored for way in routes.values() for stored in (way.start, *way.changes)}
    here = filter(folder.has, sources)
    if any(on_threads(lambda stored: _drop_if_damaged(folder, stored), here)):
        return _routes(store, folder, target, history)  # without them, other ways may be shorter
    return routes, sources


def _drop_if_damaged(folder: LocalFolder, stored: Stored) -> bool:
    """Remove an object that is here and damaged. Returns True if it was."""
    if (found := folder.hashed(stored)) == stored:
        return False
    path = folder.object(stored)
    logger.warning("%s is damaged, and is removed: it has %s", path, found)
    path.unlink()
    return True


def _route(store: ObjectStore, folder: LocalFolder, name: str, target: Manifest, history: History) -> Route:
    if found := route(name, target, history.find, folder.has):
        return found
    at = target
    while at.base:  # raises the reason
        at = history.require(at.base)
    problem = f"no earlier version has its {name}: publish with --anchor"
    raise StoreError(store.url, manifest_name(target.version), problem, target.version)


def _make(store: ObjectStore, folder: LocalFolder, version: int, wanted: Stored, way: Route) -> None:
    """Make a file of a version from objects that are here."""
    start, part = folder.object(way.start), folder.part(wanted.sha256)
    shutil.copyfile(start, part)
    tensor_file.apply([folder.object(each) for each in way.changes], part)
    if (found := Stored.of(part)) == wanted:
        folder.add(part, wanted)
        return
    raise StoreError(store.url, way.changes[-1].name, f"applied, it gives {found}, not {wanted}", version)


def _fetch(store: ObjectStore, folder: LocalFolder, stored: Stored, version: int, meter: Meter) -> None:

    def parts() -> Iterator[memoryview]:
        for part in store.stream(stored.name):
            yield part
            meter.moved(len(part))

    try:
        found = folder.save(stored.sha256, parts())
    except StoreError as error:
        raise StoreError(error.store, error.name, error.problem, version) from error
    if found != stored:
        problem = f"it is damaged: {found}, not {stored}"
        raise StoreError(store.url, stored.name, problem, version)
    folder.add(folder.part(stored.sha256), stored)
