"""The versions that a store has."""

from __future__ import annotations

from weightsync.errors import StoreError
from weightsync.stores.manifest import FOLDER, Manifest, manifest_name
from weightsync.stores.object_store import ObjectStore


class _DamagedError(StoreError):
    """A manifest cannot be used."""


class History:
    """The versions of a store when this was made.

    Attributes:
        versions: the numbers, rising.
        newest_listed: the size and time of the newest manifest that is listed; None if there is none.
    """

    def __init__(self, store: ObjectStore, known: int = 0) -> None:
        """`known`: a version that a local folder has. If it is there, it counts even if the list is late."""
        self._store = store
        listed = store.list(FOLDER)
        names = (name.removeprefix(f"{FOLDER}/").removesuffix(".json") for name in listed)
        self.versions = sorted(int(name) for name in names if name.isdecimal())
        self.newest_listed = listed.get(manifest_name(self.newest))
        self._read: dict[int, Manifest] = {}
        if known > self.newest and self.find(known):
            self.versions.append(known)

    @property
    def newest(self) -> int:
        """The newest version, 0 if there is none."""
        return self.versions[-1] if self.versions else 0

    def find(self, version: int) -> Manifest | None:
        """Return the manifest of a version, None if it is not there or damaged."""
        try:
            return self.require(version)
        except _DamagedError:
            return None

    def require(self, version: int) -> Manifest:
        """Return the manifest of a version. Raises StoreError if it is not there or damaged."""
        if version not in self._read:
            data = self._store.read(name := manifest_name(version))
            if data is None:
                there = f"versions {self.versions[0]} to {self.newest} are" if self.versions else "none is"
                raise _DamagedError(self._store.url, name, f"it is not there; {there}", version)
            try:
                self._read[version] = Manifest.decode(data, version)
            except ValueError as error:
                raise _DamagedError(self._store.url, name, f"it is damaged: {error}", version) from error
        return self._read[version]
