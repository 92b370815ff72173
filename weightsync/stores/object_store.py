"""Objects by name in a folder, in memory, in S3 or in GCS. The one module that knows obstore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError, StoreError, nearest

_SCHEMES = ("file", "gs", "memory", "s3")
_CHUNK = 8 << 20
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of an object."""
_PARTS_AT_ONCE = 2
"""Parts of an object that are uploaded at once. All that share a link have to arrive in half a minute."""
Moved = Callable[[int], None]
"""Is told how many more bytes have moved."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object's size, and when it was written, by the clock of the store."""

    nbytes: int
    written: datetime


class ObjectStore:
    """The objects under a URL, such as ``s3://bucket/policy`` or ``file:///mnt/policy``.

    Credentials, regions and endpoints come from the environment, as obstore says. All methods raise a
    StoreError that names the object.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        """`make`: make the folder of a ``file://`` URL.

        Raises ConfigError if the URL cannot be one of a store, or obstore is not installed.
        """
        self.url = url
        scheme = url.partition(":")[0].lower()
        if scheme not in _SCHEMES:
            remedy = f"give file:///mnt/policy or s3://bucket/policy; {nearest(scheme, _SCHEMES)}"
            raise ConfigError("URL", url, remedy)
        try:
            import obstore.exceptions
        except ImportError as error:
            remedy = "obstore is not installed: pip install 'weightsync[store]'"
            raise ConfigError("URL", url, remedy) from error
        self._obstore: Any = obstore
        self._errors = (obstore.exceptions.BaseError, OSError)
        try:
            self._store = _memory(url) if scheme == "memory" else _opened(url, scheme == "file" and make)
        except (*self._errors, ValueError) as error:
            raise ConfigError("URL", url, _first_line(error)) from error

    def list(self, folder: str) -> Mapping[str, Listed]:
        """Return the objects of a folder, by name."""
        with self._told(folder):
            every = [meta for page in self._obstore.list(self._store, folder) for meta in page]
        return {meta["path"]: Listed(meta["size"], meta["last_modified"]) for meta in every}

    def read(self, name: str) -> bytes | None:
        """Return an object's bytes, None if it is not there."""
        with self._told(name):
            try:
                return bytes(self._obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield an object's bytes in parts, however long that takes while parts arrive.

        obstore gives up after 11 requests of half a minute, or after three minutes.
        """
        at = 0
        while True:
            begin = at
            try:
                options = {"range": {"offset": at}} if at else {}
                found = self._obstore.get(self._store, name, options=options)
                for part in found.stream(min_chunk_size=_CHUNK):
                    yield memoryview(part)
                    at += len(part)
                return
            except self._errors as error:
                if at == begin:
                    raise self._error(name, error) from error

    def put(self, name: str, path: Path, moved: Moved) -> None:
        """Upload a file. The object appears once it is whole."""
        with self._told(name):
            nbytes = path.stat().st_size
            if nbytes > _CHUNK:
                size = max(_CHUNK, nbytes // _MOST_PARTS)
                parts = _parts(path, moved)
                self._obstore.put(self._store, name, parts, chunk_size=size, max_concurrency=_PARTS_AT_ONCE)
            else:
                self._obstore.put(self._store, name, path.read_bytes(), use_multipart=False)
                moved(nbytes)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet. Returns False if it is."""
        with self._told(name):
            try:
                self._obstore.put(self._store, name, data, mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects in this order."""
        for name in names:
            with self._told(name):
                self._obstore.delete(self._store, name)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise self._error(name, error) from error

    def _error(self, name: str, error: Exception) -> StoreError:
        problem = "it is not there" if isinstance(error, FileNotFoundError) else _first_line(error)
        return StoreError(self.url, name, problem)


def _parts(path: Path, moved: Moved) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            yield part
            moved(len(part))


def _opened(url: str, make: bool) -> Any:  # noqa: ANN401 (one of obstore's classes)
    from obstore.store import from_url

    return from_url(url, mkdir=True) if make else from_url(url)


@functools.cache
def _memory(url: str) -> Any:  # noqa: ANN401
    """The store of this process under that URL."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
