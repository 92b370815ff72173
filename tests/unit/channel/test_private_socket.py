"""Folders of sockets: short enough for the kernel wherever TMPDIR is, and nobody else's."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleets.loop import Loop, drive
from weightsync.channel import private_socket
from weightsync.channel.feed import HolderFeed
from weightsync.channel.private_socket import MAX_PATH_NBYTES, PrivateDirectory
from weightsync.engines.sglang.rank_calls import Replies
from weightsync.errors import ConfigError

Place = Callable[[int], Path]


@pytest.fixture
def root() -> Iterator[Path]:
    """A short folder: pytest's own may be too long for the shorter lengths."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        yield Path(root)


@pytest.fixture
def place(root: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes a folder whose path has so many bytes, and has it be TMPDIR."""

    def made(nbytes: int) -> Path:
        folder = root / ("x" * (nbytes - len(str(root)) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)  # Python reads the variable once
        assert tempfile.gettempdir() == str(folder)
        return folder

    return made


def test_a_fleet_with_a_long_tmpdir_makes_an_update(place: Place) -> None:
    folder = place(120)

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert sorted(report.engines) == ["e0", "e1"]
        assert loop.holds_the_models_weights("e0")

    drive(work)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "listen",
    [
        lambda: HolderFeed("holder 0", "e0", (), None, -1),
        lambda: Replies("e0", 1),
    ],
    ids=["feed", "replies"],
)
@pytest.mark.parametrize("nbytes", [78, 79, 80, 81, MAX_PATH_NBYTES])
def test_every_socket_has_room_at_every_length(
    listen: Callable[[], Replies], nbytes: int, place: Place
) -> None:
    place(nbytes)
    listen().close()


def test_tmpdir_is_used_where_it_is_short_enough(place: Place) -> None:
    folder = place(60)
    directory = PrivateDirectory()
    assert directory.path.parent == folder
    directory.remove()


def test_the_other_folder_is_private(place: Place) -> None:
    place(120)
    directory = PrivateDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.path.stat().st_uid == os.geteuid()
    directory.remove()
    assert not directory.path.exists()


def test_without_a_short_folder_the_error_names_tmpdir_its_length_and_the_limit(
    place: Place, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(120)
    monkeypatch.setattr(private_socket, "_SHORT", ("/proc/none",))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"TMPDIR.*120 bytes.*at most 79.*107.*/proc/none") as raised:
        PrivateDirectory()
    assert raised.value.value == str(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
    directory = PrivateDirectory()
    assert directory.path.parent == root
    directory.remove()
