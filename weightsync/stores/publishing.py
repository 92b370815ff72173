"""Uploads a checkpoint's folder as the next version of a store."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weightsync.errors import ConfigError, SourceChangedError, StoreError
from weightsync.stores import tensor_file
from weightsync.stores.following import bring
from weightsync.stores.history import History
from weightsync.stores.local_folder import LocalFolder, Stamp, stamp
from weightsync.stores.manifest import OBJECTS, Manifest, Stored, VersionFile, manifest_name
from weightsync.stores.meter import Meter, Tell, silent
from weightsync.stores.object_store import Listed, ObjectStore
from weightsync.stores.pruning import is_left_over
from weightsync.stores.routes import MOST_DELTAS, since_anchor
from weightsync.stores.threads import on_threads

_CHUNK = 8 << 20
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """The version that a folder is in a store.

    Attributes:
        nbytes: the bytes that were uploaded.
        is_new: False if the newest version has the same files, and nothing was published.
    """

    version: int
    nbytes: int
    is_anchor: bool
    is_new: bool


def publish(
    store: ObjectStore, files: Path, copy: LocalFolder, *, anchor: bool = False, tell: Tell = silent
) -> PublishedFolder:
    """Publish the folder `files` as the next version.

    If the call is interrupted or raises, the store has no new version, and the next call does not upload
    the objects again that are there.

    Args:
        copy: a folder for a copy of the newest version, with which `files` are compared. If it has another
            version, the newest is downloaded.
        anchor: upload all files whole, also those that are there. The versions before may be damaged.

    Raises:
        ConfigError: `files` has no safetensors file.
        SourceChangedError: a file was written while it was read.
        StoreError: another publisher was faster, or the store cannot be read or written.
    """
    with copy.locked():
        history = History(store, copy.version)
        newest = history.require(history.newest) if history.newest and not anchor else None
        if newest:
            bring(store, copy, newest, history, tell)
        copy.tidy()
        before = _stamps(files)
        stored = on_threads(partial(_take, copy), before)
        taken = dict(zip((path.name for path in before), stored, strict=True))
        if changed := before.items() ^ _stamps(files).items():  # else the version would be a mix of two
            raise SourceChangedError(0, (), sorted({str(path) for path, _ in changed}))
        if newest and {name: stored.sha256 for name, stored in taken.items()} == newest.contents:
            return PublishedFolder(newest.version, 0, newest.is_anchor, is_new=False)
        made = replace(_compared(copy, taken, newest, history), version=history.newest + 1)
        there = {} if anchor else store.list(OBJECTS)
        nbytes = _upload(store, copy, made, there, history, tell)
        _announce(store, made)
        copy.show(made)
        return PublishedFolder(made.version, nbytes, made.is_anchor, is_new=True)


def _stamps(folder: Path) -> dict[Path, Stamp]:
    """Return the files to publish, and what any write to them changes."""
    found = sorted(path for path in folder.glob("[!.]*") if path.is_file())
    if not any(path.suffix == ".safetensors" for path in found):
        raise ConfigError("FOLDER", str(folder), "give a folder with safetensors files")
    if wrong := [path for path in found if not _has_name(path)]:
        remedy = f"rename the file: a name is UTF-8, and has at most {_LONGEST_NAME} bytes"
        raise ConfigError("FOLDER", str(wrong[0]), remedy)
    return {path: stamp(path) for path in found}


def _has_name(path: Path) -> bool:
    """Return True if a manifest, and names of local files, can have the name."""
    try:
        return len(path.name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _take(copy: LocalFolder, path: Path) -> Stored:
    """Copy a file, so that it stays as it is while it is compared and uploaded."""
    stored = copy.save(f"taken {path.name}", _parts(path))
    copy.add(copy.part(f"taken {path.name}"), stored)
    return stored


def _parts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while part := file.read(_CHUNK):
                yield part
    except FileNotFoundError as error:
        raise SourceChangedError(0, (), (str(path),)) from error
    except OSError as error:  # the disk of the copy is not to blame
        raise ConfigError("FOLDER", str(path), f"it cannot be read: {error.strerror}") from error


def _compared(
    copy: LocalFolder, taken: Mapping[str, Stored], newest: Manifest | None, history: History
) -> Manifest:
    """Return what to publish. The deltas are in `copy`. Its version is still to be set."""
    publisher = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
    before = newest.files if newest else {}
    compared = on_threads(lambda name: _file(copy, name, taken[name], before.get(name)), taken)
    files = dict(zip(taken, compared, strict=True))
    made = Manifest(0, newest.version if newest else None, publisher, files)
    num, nbytes = since_anchor(newest, history.find) if newest else (0, 0)
    if num + 1 > MOST_DELTAS or nbytes + made.delta_nbytes > made.nbytes:
        made = replace(made, files={name: replace(file, whole=True) for name, file in files.items()})
    return made


def _file(copy: LocalFolder, name: str, stored: Stored, before: VersionFile | None) -> VersionFile:
    if before and before.content == stored:
        return VersionFile(stored, whole=False, base=stored.sha256)
    if before and name.endswith(".safetensors"):
        base = copy.object(before.content)
        data = tensor_file.delta(base, copy.object(stored))
        if data is not None and Stored.of(base) == before.content:  # a damaged copy misleads followers
            delta = copy.save(f"delta {name}", [data.data])
            copy.add(copy.part(f"delta {name}"), delta)
            return VersionFile(stored, whole=False, base=before.content.sha256, delta=delta)
    return VersionFile(stored, whole=True)


def _upload(
    store: ObjectStore,
    copy: LocalFolder,
    made: Manifest,
    there: Mapping[str, Listed],
    history: History,
    tell: Tell,
) -> int:
    """Upload the objects that are not there. One that a pruner may remove counts as not there."""
    missing = []
    for stored in sorted(made.objects, key=lambda each: each.sha256):
        listed = there.get(stored.name)
        if not listed or listed.nbytes != stored.nbytes or is_left_over(listed, history):
            missing.append(stored)
    meter = Meter(tell, sum(stored.nbytes for stored in missing))
    on_threads(lambda stored: store.put(stored.name, copy.object(stored), meter.moved), missing)
    return meter.nbytes


def _announce(store: ObjectStore, made: Manifest) -> None:
    """Write the manifest, unless another publisher has. The store may have it, and say so too late."""
    name = manifest_name(made.version)
    if store.create(name, made.encode()):
        return
    winner = History(store).require(made.version)
    if winner != made:
        problem = f"{winner.publisher} has published this version: publish again for the next one"
        raise StoreError(store.url, name, problem, made.version)
