"""A store whose newest version stands for trainers, as a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weightsync.actors.progress import byte_bar
from weightsync.errors import SourceChangedError
from weightsync.stores.following import follow
from weightsync.stores.local_folder import LocalFolder, default_folder
from weightsync.stores.object_store import ObjectStore


class FollowedStore:
    """A store, and the local folder that follows it.

    Attributes:
        exclude, stored: as of `register_checkpoint`.
        checkpoint: the checkpoint that is registered for it, such as ``store@7``; "" before the first.
        files: the folder of the files of `checkpoint`.
    """

    def __init__(
        self, name: str, url: str, folder: str | Path | None, exclude: Collection[str], stored: bool
    ) -> None:
        """Raises ConfigError if the URL or the folder cannot be used."""
        self._name, self._store = name, ObjectStore(url)
        self._folder = LocalFolder(Path(folder) if folder else default_folder(url, "followed"))
        self.exclude, self.stored = exclude, stored
        self.checkpoint = ""
        self.files: Path | None = None

    def follow(self) -> tuple[str, Path]:
        """Download the newest version. Returns the checkpoint's name and the files' folder.

        Files that are here already are hashed, unless nothing has changed them since they were hashed. If a
        file that is registered was changed, `files` becomes None: they have to be registered again.
        """
        if self.files and self._folder.changed(self.files):
            self.files = None
        with byte_bar(f"follow {self._name}") as tell:
            found = follow(self._store, self._folder, tell=tell, checks=True)
        return f"{self._name}@{found.version}", found.files

    def require_unchanged(self, files: Path) -> None:
        """Raise SourceChangedError if a file of `files` has changed since `follow` hashed it."""
        if changed := self._folder.changed(files):
            raise SourceChangedError(0, (), changed)
