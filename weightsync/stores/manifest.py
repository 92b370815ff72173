"""The manifest of one version of a store: its files, and the objects that followers make them of."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

FOLDER = "versions"
OBJECTS = "objects"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, which never changes. Its name in the store is its hash."""

    sha256: str
    nbytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):  # it is part of a path
            raise ValueError(f"{self.sha256!r} is no sha256")

    def __str__(self) -> str:
        return f"{self.nbytes} bytes with sha256 {self.sha256}"

    @classmethod
    def of(cls, path: Path) -> Stored:
        """Hash a file."""
        with path.open("rb") as file:
            return cls(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)

    @property
    def name(self) -> str:
        return f"{OBJECTS}/{self.sha256}"


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A file of a version.

    Attributes:
        content: the bytes of the file.
        whole: whether the store has an object with these bytes.
        base: the sha256 of the file of this name in the version before, if it is of use here.
        delta: the object with the changes since `base`; None if `base` is equal.
    """

    content: Stored
    whole: bool
    base: str | None = None
    delta: Stored | None = None

    @property
    def objects(self) -> Iterator[Stored]:
        """The objects that this file names."""
        if self.whole:
            yield self.content
        if self.delta:
            yield self.delta


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version. It is an anchor if the store has all files whole.

    Attributes:
        base: the version before, if this version has files that are changes since it.
        publisher: the host and the process that published it.
    """

    version: int
    base: int | None
    publisher: str
    files: Mapping[str, VersionFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := [name for name in self.files if name in ("", ".", "..") or {*name} & {"/", "\0"}]:
            raise ValueError(f"{wrong[0]!r} is no name of a file")

    @property
    def is_anchor(self) -> bool:
        return all(file.whole for file in self.files.values())

    @property
    def objects(self) -> frozenset[Stored]:
        """All objects that this version names."""
        return frozenset(stored for file in self.files.values() for stored in file.objects)

    @property
    def delta_nbytes(self) -> int:
        return sum(file.delta.nbytes for file in self.files.values() if file.delta)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.content.nbytes for file in self.files.values())

    @property
    def contents(self) -> Mapping[str, str]:
        """The sha256 of each file."""
        return {name: file.content.sha256 for name, file in self.files.items()}

    def encode(self) -> bytes:
        """Return a line of JSON, and a line with its sha256."""
        line = msgspec.json.encode(self)
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @staticmethod
    def decode(data: bytes, version: int) -> Manifest:
        """Read what `encode` wrote. Raises ValueError if it is damaged, or not of `version`."""
        line, _, digest = data.partition(b"\n")
        found = hashlib.sha256(line).hexdigest()
        if digest != found.encode() + b"\n":
            raise ValueError(f"sha256 is {found}, not {digest.decode(errors='replace').strip() or 'there'}")
        made = msgspec.json.decode(line, type=Manifest)
        if made.version != version or (made.base or 0) >= version:  # else routes may have no end
            raise ValueError(f"it is of version {made.version}, since {made.base}")
        return made


def manifest_name(version: int) -> str:
    """Return the name of a version's manifest in its store."""
    return f"{FOLDER}/{version:08d}.json"
