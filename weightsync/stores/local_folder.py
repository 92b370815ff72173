"""A local folder with versions of a store::

    objects/<sha256>            files, each complete and checked
    versions/00000007-1a2b3c4d/ links to the files of a version
    current                     a link to one of these folders, replaced last

Readers open ``current``, and so they only see whole versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from weightsync.errors import ConfigError
from weightsync.stores.manifest import Manifest, Stored

_PART = ".part"
"""How names of files end that are being written."""
LONGEST_S = 3600.0
"""How long a process waits for another one, which may download a version."""
_PAUSE_S = 0.1
Stamp: TypeAlias = tuple[int, ...]
"""Which file it is, and its size and times. Any write changes them."""


def default_folder(url: str, use: str) -> Path:
    """Return the folder of a store in the user's cache. Folders for other uses do not wait for it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "weightsync", use, hashlib.sha256(url.encode()).hexdigest()[:16])


class LocalFolder:
    """A folder that `follow` keeps at a version. One process at a time changes it."""

    def __init__(self, path: Path) -> None:
        """Make the folder. Raises ConfigError if that is not possible, or it has other files."""
        self.path = path
        self.current = path / "current"
        self._objects, self._versions, self._lock = path / "objects", path / "versions", path / "lock"
        self._hashed: dict[str, Stamp] = {}
        with _told(path):
            path.mkdir(parents=True, exist_ok=True)
            if not self._lock.exists() and any(path.iterdir()):
                raise ConfigError("FOLDER", str(path), "it has other files: give a new folder")
            self._lock.touch()
            for each in (self._objects, self._versions):
                each.mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes that would change the folder waiting.

        Raises ConfigError if a disk is full, or names the process that changes the folder for `LONGEST_S`.
        """
        deadline = time.monotonic() + LONGEST_S
        with _told(self.path), self._lock.open("r+") as lock:
            while not _locked(lock):
                if time.monotonic() > deadline:
                    remedy = f"process {lock.read()} changes it for {LONGEST_S:g} s: end it, or give another"
                    raise ConfigError("FOLDER", str(self.path), remedy)
                time.sleep(_PAUSE_S)
            lock.truncate()
            lock.write(f"{os.getpid()}")
            lock.flush()
            yield

    @property
    def version(self) -> int:
        """The version that readers see, 0 if there is none yet."""
        return int(self._shown.partition("-")[0]) if self._shown else 0

    @property
    def _shown(self) -> str:
        return os.path.basename(os.readlink(self.current)) if self.current.is_symlink() else ""

    @property
    def files(self) -> Path:
        """The folder of the version that readers see. Unlike `current` it stays at this version."""
        return self.current.resolve()

    def object(self, stored: Stored) -> Path:
        """Return the path of an object. If there is a file, it is complete."""
        return self._objects / stored.sha256

    def has(self, stored: Stored) -> bool:
        return self.object(stored).exists()

    def hashed(self, stored: Stored) -> Stored:
        """Hash the object that is here as `stored`, unless nothing has changed it since it was hashed."""
        path = self.object(stored)
        before = stamp(path)
        if self._hashed.get(stored.sha256) == before:
            return stored
        found = Stored.of(path)
        if found == stored and stamp(path) == before:
            self._hashed[stored.sha256] = before
        return found

    def changed(self, files: Path) -> list[str]:
        """Return the paths in the folder of a version that are not as they were hashed by this object."""
        links = [*files.iterdir()] if files.is_dir() else [files]
        return [str(link) for link in links if self._hashed.get(link.resolve().name) != stamp(link)]

    def part(self, name: str) -> Path:
        """Return a path for a file that is to become an object by `add`."""
        return self._objects / (name + _PART)

    def save(self, name: str, parts: Iterable[bytes | memoryview]) -> Stored:
        """Write a file at ``part(name)``."""
        digest, nbytes = hashlib.sha256(), 0
        with self.part(name).open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                nbytes += len(part)
        return Stored(digest.hexdigest(), nbytes)

    def add(self, part: Path, stored: Stored) -> None:
        """Make a file at a path of `part`, of which `stored` is true, an object."""
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if self.has(stored):
            part.unlink()  # readers of the other file look at its inode
        else:
            part.rename(path := self.object(stored))
            self._hashed[stored.sha256] = stamp(path)

    def shows(self, manifest: Manifest) -> bool:
        """Return True if readers see this version, and all files are there."""
        name = _folder_name(manifest)
        return self._shown == name and self._is_whole(self._versions / name, manifest)

    def show(self, manifest: Manifest) -> None:
        """Switch to a version whose files are here. Files of the version before stay until `tidy`."""
        name = _folder_name(manifest)
        if not self._is_whole(self._versions / name, manifest):
            for folder in (part := self._versions / (name + _PART), self._versions / name):
                shutil.rmtree(folder, ignore_errors=True)
            part.mkdir()
            for file, sha256 in manifest.contents.items():
                (part / file).symlink_to(f"../../objects/{sha256}")
            part.rename(self._versions / name)
        link = self.path / f"current{_PART}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"versions/{name}")
        link.replace(self.current)

    @staticmethod
    def _is_whole(files: Path, manifest: Manifest) -> bool:
        """Return True if all files of a version are there. A cleaner of caches may have removed some."""
        return all((files / name).exists() for name in manifest.files)

    def tidy(self, needed: Collection[Stored] = ()) -> None:
        """Remove all but the version that readers see, and objects that are needed next."""
        for folder in self._versions.iterdir():
            if folder.name != self._shown:
                shutil.rmtree(folder)
        used = {stored.sha256 for stored in needed}
        if self.current.is_dir():
            used |= {os.path.basename(os.readlink(link)) for link in self.current.iterdir()}
        for file in self._objects.iterdir():
            if file.name not in used:
                file.unlink()


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stamp(path: Path) -> Stamp:
    """Return which file is at a path, and its size and times; nothing if there is none."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return ()
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _folder_name(manifest: Manifest) -> str:
    digest = hashlib.sha256(repr(sorted(manifest.contents.items())).encode())
    return f"{manifest.version:08d}-{digest.hexdigest()[:8]}"


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = f"{error}: give a folder to write to, with enough space"
        raise ConfigError("FOLDER", str(path), remedy) from error
