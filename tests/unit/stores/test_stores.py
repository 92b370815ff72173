"""Stores in a folder and in memory: joining, sleeping, crashes, damage, races and pruning."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import obstore.exceptions
import pytest

from tests.pages import ROOT
from tests.patience import patient
from tests.unit.stores.store_rig import FILES, Crash, Site, content, crashes, save, tensors
from weightsync.errors import ConfigError, SourceChangedError, StoreError
from weightsync.stores import tensor_file
from weightsync.stores.following import follow
from weightsync.stores.history import History
from weightsync.stores.local_folder import LocalFolder, default_folder
from weightsync.stores.manifest import OBJECTS, Manifest, Stored, VersionFile, manifest_name
from weightsync.stores.object_store import Listed, ObjectStore
from weightsync.stores.pruning import prune
from weightsync.stores.publishing import publish

STEPS = {ObjectStore: ("put", "create", "stream"), Path: ("rename", "replace", "symlink_to")}
"""A process is ended after each of these calls."""


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    """Waits for no disk."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A store with 20 versions, of which the first and the eleventh are anchors."""
    site = Site(tmp_path_factory.mktemp("store"))
    for version in range(1, 21):
        made = site.publish(anchor=version == 11)
        assert (made.version, made.is_anchor) == (version, version in (1, 11))
    return site


def test_a_follower_joins_at_each_version(twenty: Site) -> None:
    for version in range(1, 21):
        assert twenty.follow(f"joined {version}", version).version == version
    assert twenty.follow("newest").version == 20


def test_a_follower_that_slept_takes_the_changes_of_all_versions_and_writes_each_file_once(
    twenty: Site,
) -> None:
    history = History(twenty.store)
    manifests = {version: history.require(version) for version in history.versions}
    twenty.follow("slept", 12)
    with mock.patch.object(tensor_file, "apply", wraps=tensor_file.apply) as applied:
        found = twenty.follow("slept", 20)
    state = manifests[20].files["trainer_state.json"].content.nbytes
    assert found.nbytes == state + sum(manifests[version].delta_nbytes for version in range(13, 21))
    assert applied.call_count == len(FILES)
    twenty.follow("slept longer", 2)
    with mock.patch.object(tensor_file, "apply", wraps=tensor_file.apply) as applied:
        assert twenty.follow("slept longer", 10).nbytes < manifests[1].nbytes
    assert applied.call_count == len(FILES)
    assert twenty.follow("slept longer", 20).nbytes > manifests[11].nbytes, "no delta leads to version 11"


@pytest.mark.parametrize(("share", "takes"), [(0.02, "deltas"), (0.22, "anchor")])
def test_a_follower_that_slept_for_ten_versions_downloads_the_deltas_or_the_anchor_if_it_is_less(
    site: Site, share: float, takes: str
) -> None:
    made = [site.publish(share) for _ in range(12)]
    history = History(site.store)
    files = {version: history.require(version).files for version in history.versions}
    site.follow("slept", 2)
    found = site.follow("slept", 12).nbytes

    def nbytes(name: str, first: int) -> int:
        return sum(delta.nbytes for v in range(first, 13) if (delta := files[v][name].delta))

    anchor = max(each.version for each in made if each.is_anchor)
    ways = {
        "deltas": sum(nbytes(name, 3) for name in FILES),
        "anchor": sum(files[anchor][name].content.nbytes + nbytes(name, anchor + 1) for name in FILES),
    }
    assert min(ways, key=ways.__getitem__) == takes
    assert found == ways[takes] + files[12]["trainer_state.json"].content.nbytes
    assert all(site.follow(f"joins {v}", v).nbytes <= 2 * history.require(v).nbytes for v in files)


def test_a_follower_goes_back(twenty: Site) -> None:
    assert [twenty.follow("back", version).version for version in (20, 3, 20)] == [20, 3, 20]


def test_a_store_in_memory_is_of_its_process(tmp_path: Path) -> None:
    site = Site(tmp_path, f"memory://{tmp_path}")
    assert [site.publish().version for _ in range(2)] == [1, 2]
    site.follow("f")
    assert History(ObjectStore(site.url)).newest == 2
    assert History(ObjectStore("memory://other")).newest == 0


def test_deltas_are_short_and_files_that_are_equal_are_not_sent(site: Site) -> None:
    site.publish()
    whole = History(site.store).require(1).nbytes
    made = site.publish(0.01)
    assert made.nbytes < whole / 20
    assert not made.is_anchor
    again = publish(site.store, site.root / "files", site.copy)
    assert (again.version, again.nbytes, again.is_new) == (2, 0, False)
    step = save(site.root / "files", site.held, 77)
    made = site.publish_again(step)
    assert (made.version, made.nbytes) == (3, len('{"step": 77}'))
    assert site.follow("f").version == 3


def test_deltas_that_add_up_to_the_anchor_make_a_new_one_and_followers_need_not_download_it(
    site: Site,
) -> None:
    made = [site.publish(0.22) for _ in range(6)]
    assert [each.is_anchor for each in made] == [True, False, False, False, True, False]
    history = History(site.store)
    anchor = history.require(5)
    site.follow("f", 4)
    followed = site.follow("f", 5)
    assert followed.nbytes == anchor.delta_nbytes + anchor.files["trainer_state.json"].content.nbytes
    assert followed.nbytes < anchor.nbytes / 2
    assert site.follow("joins", 5).nbytes == anchor.nbytes
    assert site.follow("slept", 1).nbytes == history.require(1).nbytes
    assert site.follow("slept", 6).nbytes < history.require(6).delta_nbytes + anchor.nbytes + 100


def test_so_many_versions_after_an_anchor_make_a_new_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.stores.publishing.MOST_DELTAS", 2)
    made = [site.publish(0.01) for _ in range(5)]
    assert [each.is_anchor for each in made] == [True, False, False, True, False]


def test_a_file_with_another_header_comes_whole(site: Site) -> None:
    site.publish()
    site.publish_again(save(site.root / "files", site.held, 2, metadata={"format": "pt"}))
    files = History(site.store).require(2).files
    assert [files[name].whole for name in FILES] == [True, False]
    site.held["embed"] = np.zeros((100, 35), np.float32)
    site.publish()
    assert History(site.store).require(3).files[FILES[0]].whole
    os.unlink(site.root / "files" / FILES[1])
    site.publish_again(site.root / "files")
    for strange in (b"", b"short", bytes(range(60))):
        for end in (b"", b"."):
            (site.root / "files" / "other.safetensors").write_bytes(strange + end)
            site.publish_again(site.root / "files")
    for version in (1, 3, 2, 4, 10, 7):
        site.follow("f", version)


@pytest.mark.parametrize(
    "header", ["{}", "[]", '{"a": 1}', '{"a": {"data_offsets": [0, 9], "shape": [2]}}', "[" * 10**5]
)
def test_a_file_that_is_no_safetensors_file_comes_whole(site: Site, header: str) -> None:
    """An index need not name all files of a folder, and nobody checks the others."""
    files = save(site.root / "files", site.held)
    for number in (1, 2):
        data = len(header).to_bytes(8, "little") + header.encode() + bytes([number] * 100)
        (files / "optimizer.safetensors").write_bytes(data)
        site.publish_again(files)
        site.follow("f")
    assert History(site.store).require(2).files["optimizer.safetensors"].whole


def test_a_publisher_that_has_no_copy_downloads_the_newest_version(site: Site) -> None:
    for _ in range(3):
        site.publish()
    site.copy = site.folder("another host's copy")
    assert not site.publish().is_anchor
    site.follow("f")


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_file_that_is_written_while_files_are_read_is_named(site: Site, after: int) -> None:
    """A trainer saves its next step once so many files were taken: a mix of two steps is no version."""
    site.publish()
    add, calls = LocalFolder.add, itertools.count()

    def then_saved(folder: LocalFolder, part: Path, stored: Stored) -> None:
        add(folder, part, stored)
        if next(calls) == after:
            save(site.root / "files", tensors(3), 3)

    one_by_one = mock.patch("weightsync.stores.threads.NUM_THREADS", 1)
    at = mock.patch.object(LocalFolder, "add", then_saved)
    with (
        one_by_one,
        at,
        pytest.raises(SourceChangedError, match=r"config.json, .*publish it again") as caught,
    ):
        publish(site.store, site.root / "files", site.copy)
    assert {Path(file).name for file in caught.value.files} == {*content(site.root / "files")}
    assert History(site.store).newest == 1
    assert site.publish().version == 2
    site.follow("f")


def test_a_folder_that_is_switched_while_its_files_are_read_is_named(site: Site) -> None:
    """`current` of a folder that is followed is another folder after each version."""
    site.publish()
    site.follow("f")
    site.publish()
    tail = Site(site.root / "tail")
    add = LocalFolder.add

    def then_followed(folder: LocalFolder, part: Path, stored: Stored) -> None:
        add(folder, part, stored)
        if part.name == f"taken {FILES[0]}.part":
            with mock.patch.object(LocalFolder, "add", add):
                site.follow("f")

    one_by_one = mock.patch("weightsync.stores.threads.NUM_THREADS", 1)
    at = mock.patch.object(LocalFolder, "add", then_followed)
    with one_by_one, at, pytest.raises(SourceChangedError, match=FILES[0]):
        tail.publish_again(site.folder("f").current)
    assert tail.publish_again(site.folder("f").current).version == 1


def test_a_file_that_goes_before_it_is_read_is_named(site: Site) -> None:
    files = save(site.root / "files", tensors())
    add = LocalFolder.add

    def then_gone(folder: LocalFolder, part: Path, stored: Stored) -> None:
        add(folder, part, stored)
        (files / "trainer_state.json").unlink(missing_ok=True)

    one_by_one = mock.patch("weightsync.stores.threads.NUM_THREADS", 1)
    at = mock.patch.object(LocalFolder, "add", then_gone)
    with one_by_one, at, pytest.raises(SourceChangedError, match=r"/trainer_state.json changed"):
        publish(site.store, files, site.copy)


@pytest.mark.parametrize("name", [b"\xff.json", b"n" * 201])
def test_a_name_that_no_manifest_can_have_is_refused(site: Site, name: bytes) -> None:
    files = save(site.root / "files", tensors())
    (files / os.fsdecode(name)).touch()
    with pytest.raises(ConfigError, match=r"rename the file: a name is UTF-8, and has at most 200 bytes"):
        publish(site.store, files, site.copy)
    assert not site.file(OBJECTS).exists()


def test_a_file_that_cannot_be_read_is_named_and_not_the_folder_of_the_copy(site: Site) -> None:
    files = save(site.root / "files", tensors())
    (files / "memory.bin").symlink_to("/proc/self/mem")  # opens, and fails to be read
    with pytest.raises(ConfigError, match=r"FOLDER: '\S*/files/memory.bin'.*cannot be read: Input/output"):
        publish(site.store, files, site.copy)


def test_a_publisher_that_crashes_after_any_step_publishes_nothing_or_all(tmp_path: Path) -> None:
    first = Site(tmp_path / "first")
    first.publish()
    first.publish()
    first.follow("f")
    files = save(tmp_path / "next", tensors(7), 3)
    first.contents[3] = content(files)
    site, puts, seen = first, list[str](), list[tuple[int, int]]()
    put = ObjectStore.put

    def counted(store: ObjectStore, name: str, *rest: Any) -> None:
        put(store, name, *rest)
        puts.append(name)

    def run() -> None:
        nonlocal site
        site = first.copied(tmp_path / "now")
        puts.clear()
        publish(site.store, files, site.copy)

    with mock.patch.object(ObjectStore, "put", counted):
        for _ in crashes(STEPS, run):
            seen.append((History(site.store).newest, len(puts)))
            assert site.follow("f").version == seen[-1][0]
            assert publish(site.store, files, site.copy).version == 3
            assert len(puts) == len(set(puts)), "an object was uploaded again"
            assert site.follow("f").version == 3
    assert {newest for newest, _ in seen} == {2, 3}
    assert {num for _, num in seen} == set(range(len(puts) + 1)), "it crashed after each object"


def test_a_follower_that_crashes_after_any_step_shows_a_whole_version(site: Site) -> None:
    for share in (0.02, 0.02, 0.5, 0.02):
        site.publish(share)
    site.follow("f", 1)
    now, seen = site.root / "now", set()

    def run(before: int, version: int) -> None:
        shutil.rmtree(now, ignore_errors=True)
        if before:
            shutil.copytree(site.root / "f", now, symlinks=True)
        follow(site.store, site.folder("now"), version)

    for before, version in ((0, 3), (1, 4)):
        run(before, before or 1)
        whole = site.follow("now" if before else "joins", version).nbytes
        for _ in crashes(STEPS, partial(run, before, version)):
            shown = site.folder("now").version
            seen.add((before, shown))
            if shown:
                assert content(now / "current") == site.contents[shown]
            assert site.follow("now", version).nbytes <= whole
    assert seen == {(0, 0), (0, 3), (1, 1), (1, 4)}


KILLED = """
import os, signal, sys
from pathlib import Path
from weightsync.stores.following import follow
from weightsync.stores.local_folder import LocalFolder
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.publishing import publish

name, at, calls, url, root = sys.argv[1:]
method, left = getattr(ObjectStore, at), iter(range(int(calls)))

def killing(*args):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(*args)

setattr(ObjectStore, at, killing)
if name == "publish":
    publish(ObjectStore(url), Path(root, "next"), LocalFolder(Path(root, "copy")))
else:
    follow(ObjectStore(url), LocalFolder(Path(root, "f")))
"""


@pytest.mark.parametrize(("name", "at"), [("publish", "put"), ("follow", "stream")])
def test_a_process_that_is_killed_goes_on_when_it_is_started_again(site: Site, name: str, at: str) -> None:
    site.publish()
    site.follow("f")
    files = save(site.root / "next", tensors(7), 9)
    if name == "follow":
        site.publish_again(files)
    arguments = [name, at, "2", site.url, str(site.root)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert content(site.folder("f").current) == site.contents[1]
    assert History(site.store).newest == (1 if name == "publish" else 2)
    whole = sum(map(len, content(files).values()))
    if name == "publish":
        assert 0 < site.publish_again(files).nbytes < whole
    assert 0 < site.follow("f").nbytes < whole + (whole if name == "publish" else 0)
    assert site.folder("f").version == 2


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    data[len(data) // 2] ^= 1
    path.write_bytes({"flipped": data, "torn": data[: len(data) // 2], "empty": b""}[how])


@pytest.mark.parametrize("how", ["torn", "flipped", "missing"])
def test_a_damaged_object_is_named_and_nothing_of_its_version_is_shown(site: Site, how: str) -> None:
    site.publish()
    site.follow("f")
    site.publish()
    second = History(site.store).require(2)
    changes = second.files[FILES[1]].delta
    whole = History(site.store).require(1).files[FILES[0]].content
    assert changes
    for damage, name in ((changes, "f"), (whole, "joins")):
        good = site.file(damage.name).read_bytes()
        damaged(site.file(damage.name), how)
        with pytest.raises(StoreError) as caught:
            site.follow(name)
        assert (caught.value.name, caught.value.version) == (damage.name, 2)
        found = f"sha256 [0-9a-f]{{64}}, not {damage.nbytes} bytes with sha256 {damage.sha256}"
        assert caught.match("it is not there" if how == "missing" else found)
        assert caught.match(f"^{site.url}: {damage.name} of version 2: ")
        site.file(damage.name).write_bytes(good)
        assert site.folder("f").version == 1
        assert not site.folder("joins").current.exists()
    assert site.follow("f").version == 2
    good = site.file(manifest_name(2)).read_bytes()
    damaged(site.file(manifest_name(2)), how)
    if how == "missing":
        with pytest.raises(StoreError, match=r"2.json of version 2: it is not there; versions 1 to 1 are"):
            site.follow("joins", 2)
    else:
        for run in (lambda: site.follow("joins"), site.publish):
            with pytest.raises(StoreError, match=r"2.json of version 2: it is damaged: sha256 is .*, not"):
                run()
    site.file(manifest_name(2)).write_bytes(good)
    site.follow("joins")


def test_an_anchor_repairs_a_store_that_is_damaged(site: Site) -> None:
    site.publish()
    site.publish()
    for path in site.file(OBJECTS).iterdir():
        damaged(path, "torn")
    site.copy = site.folder("of another host")
    with pytest.raises(StoreError, match="it is damaged"):
        site.publish()
    assert site.publish_again(site.root / "files", anchor=True).version == 3
    site.follow("f")
    for path in (*site.file(OBJECTS).iterdir(), site.file(manifest_name(3))):
        damaged(path, "flipped")
    assert site.publish_again(site.root / "files", anchor=True).version == 4
    site.follow("f")
    assert site.publish().version == 5
    site.follow("f")


def test_a_damaged_manifest_ends_a_route_and_is_named_if_there_is_no_other(site: Site) -> None:
    for share in (0.02, 0.2, 0.9, 0.02):
        site.publish(share)
    assert History(site.store).require(3).is_anchor
    site.follow("f", 1)
    damaged(site.file(manifest_name(2)), "torn")
    site.follow("f")
    damaged(site.file(manifest_name(3)), "torn")
    with pytest.raises(StoreError, match=r"3.json of version 3: it is damaged"):
        site.follow("joins")


@pytest.mark.parametrize(
    ("version", "base"), [(1, None), (4, None), (3, 3), (3, 4)], ids=["earlier", "later", "itself", "circle"]
)
def test_a_manifest_of_another_version_or_without_a_begin_is_damaged(
    site: Site, version: int, base: int | None
) -> None:
    site.publish()
    site.publish()
    follow(site.store, folder := site.folder("f"))
    newest = History(site.store).require(2)
    shared = {
        name: VersionFile(each.content, False, each.content.sha256) for name, each in newest.files.items()
    }
    made = Manifest(version, base, "p", shared if base else newest.files)
    site.file(manifest_name(3)).write_bytes(made.encode())
    for wanted in (None, 3):
        with pytest.raises(
            StoreError, match=f"3.json of version 3: it is damaged: it is of version {version}"
        ):
            follow(site.store, folder, wanted)
    assert folder.version == 2
    assert site.follow("joins", 2).version == 2


def test_a_file_is_hashed_again_only_if_it_was_changed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.publish()
    follow(site.store, folder := site.folder("f"))
    shared = History(site.store).require(1).files["config.json"].content
    hashed = list[str]()
    of = Stored.of
    monkeypatch.setattr(Stored, "of", lambda path: hashed.append(path.name) or of(path))
    site.publish()
    hashed.clear()
    found = follow(site.store, folder)
    assert shared.sha256 not in hashed
    assert folder.changed(found.files) == []
    folder.object(shared).touch()
    assert folder.changed(found.files) == [str(found.files / "config.json")]
    assert follow(site.store, folder, checks=True).nbytes == 0
    assert shared.sha256 in hashed
    assert folder.changed(found.files) == []
    damaged(folder.object(shared), "flipped")
    assert folder.changed(found.files) == [str(found.files / "config.json")]
    assert follow(site.store, folder, checks=True).nbytes == shared.nbytes
    assert folder.changed(found.files) == []


def test_a_folder_that_another_process_switches_meanwhile_has_the_files_of_the_version_that_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish()
    locked = LocalFolder.locked

    @contextlib.contextmanager
    def then_switched(self: LocalFolder) -> Iterator[None]:
        with locked(self):
            yield
        monkeypatch.setattr(LocalFolder, "locked", locked)
        site.publish()
        follow(site.store, site.folder("f"))

    monkeypatch.setattr(LocalFolder, "locked", then_switched)
    found = follow(site.store, folder := site.folder("f"))
    assert (found.version, found.files.name[:8]) == (1, "00000001")
    assert folder.version == 2


@pytest.mark.parametrize("how", ["torn", "flipped", "empty"])
def test_a_damaged_copy_of_the_version_before_is_downloaded_again(
    site: Site, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.publish()
    site.follow("f")
    first = History(site.store).require(1).files[FILES[0]].content
    site.publish()
    damaged(path := site.folder("f").object(first), how)
    assert site.follow("f").nbytes > first.nbytes
    assert f"{path} is damaged, and is removed: it has " in caplog.text


def test_a_delta_that_was_damaged_since_it_was_downloaded_is_downloaded_again(site: Site) -> None:
    site.publish()
    site.follow("f")
    site.publish()
    second = History(site.store).require(2).files[FILES[0]].delta
    assert second
    with mock.patch.object(tensor_file, "apply", side_effect=Crash), pytest.raises(Crash):
        site.follow("f")
    damaged(site.folder("f").object(second), "torn")
    assert site.follow("f").nbytes == second.nbytes


def test_a_damaged_file_that_later_versions_share_is_downloaded_again(site: Site) -> None:
    site.publish()
    site.follow("f")
    shared = History(site.store).require(1).files["config.json"].content
    for newer in (True, False):
        damaged(site.folder("f").object(shared), "flipped")
        if newer:
            site.publish()
            site.follow("f")
        else:
            assert follow(site.store, site.folder("f"), checks=True).nbytes == shared.nbytes
        assert content(site.folder("f").current) == site.contents[2]


@pytest.mark.parametrize("gone", ["objects/*", "versions/*", "versions/*/config.json"])
@pytest.mark.parametrize("checks", [False, True])
def test_files_that_are_removed_here_come_back(site: Site, gone: str, checks: bool) -> None:
    """A cache is cleaned by age, for example, and the version stays the newest."""
    site.publish()
    site.publish()
    site.follow("f")
    for folder in (site.folder("f"), site.copy):
        for path in folder.path.glob(gone):
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        found = follow(site.store, folder, checks=checks)
        assert (found.version, content(folder.current)) == (2, site.contents[2])
    for path in site.copy.path.glob(gone):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    assert site.publish().version == 3
    site.follow("f")


def test_a_damaged_copy_of_the_publisher_does_not_reach_followers(site: Site) -> None:
    site.publish()
    first = History(site.store).require(1).files[FILES[0]].content
    damaged(site.copy.object(first), "flipped")
    site.publish()
    assert [History(site.store).require(2).files[name].whole for name in FILES] == [True, False]
    site.follow("f")


def test_a_store_that_refuses_is_named(site: Site) -> None:
    refusal = obstore.exceptions.PermissionDeniedError("Forbidden\n\nDebug source: …")
    with mock.patch("obstore.list", side_effect=refusal), pytest.raises(StoreError) as caught:
        site.publish()
    assert str(caught.value) == f"{site.url}: versions: Forbidden"


def test_of_two_publishers_of_a_version_one_wins_and_the_other_names_it(site: Site) -> None:
    site.publish()
    other, mine = site.folder("other"), save(site.root / "mine", tensors(1), 8)
    theirs = save(site.root / "theirs", tensors(2), 9)
    create = ObjectStore.create

    def late(store: ObjectStore, name: str, data: bytes) -> bool:
        with mock.patch.object(ObjectStore, "create", create):
            publish(store, theirs, other)
        return create(store, name, data)

    with mock.patch.object(ObjectStore, "create", late), pytest.raises(StoreError) as caught:
        publish(site.store, mine, site.copy)
    winner = History(site.store).require(2).publisher
    assert caught.match(f"00000002.json of version 2: {winner} has published this version: publish again")
    site.contents[2] = content(theirs)
    site.follow("f")
    assert site.publish_again(mine).version == 3
    site.follow("f")


def test_a_version_that_is_listed_late_is_not_lost(site: Site) -> None:
    """Neither does a follower go back, nor does a publisher take itself for another one."""
    site.publish()
    site.publish()
    site.follow("f")
    listing = ObjectStore.list

    def late(store: ObjectStore, folder: str) -> Mapping[str, Listed]:
        return {name: each for name, each in listing(store, folder).items() if name != manifest_name(2)}

    with mock.patch.object(ObjectStore, "list", late):
        assert site.follow("f").version == 2
        assert site.publish().version == 3
        assert site.follow("joins").version == 3
    assert site.follow("f").version == 3


def test_publishers_at_once_all_get_a_version_or_lose(site: Site) -> None:
    meet = threading.Barrier(3)
    create = ObjectStore.create

    def at_once(*args: Any) -> bool:
        meet.wait(patient(30))
        return create(*args)

    def one(number: int) -> int:
        files = save(site.root / f"files {number}", tensors(number), number)
        with contextlib.suppress(StoreError):
            return publish(site.store, files, site.folder(f"copy {number}")).version
        return 0

    with mock.patch.object(ObjectStore, "create", at_once), ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(one, range(3))) == [0, 0, 1]


def test_a_publisher_that_is_told_too_late_that_it_has_won_has_won(site: Site) -> None:
    create = ObjectStore.create

    def twice(*args: Any) -> bool:
        create(*args)
        return create(*args)

    with mock.patch.object(ObjectStore, "create", twice):
        assert site.publish().version == 1


def aged(site: Site, hours: float) -> None:
    """Have all objects be older."""
    for path in (*site.file(OBJECTS).iterdir(), *site.file("versions").iterdir()):
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - round(hours * 3600e9)))


@pytest.mark.parametrize("keep", [1, 2, 4, 20])
def test_pruning_leaves_what_followers_of_the_last_versions_need(site: Site, keep: int) -> None:
    for version in range(1, 9):
        site.publish(anchor=version in (3, 6))
        site.follow(f"at {version}")
    aged(site, 2)
    site.publish()
    first = {1: 6, 2: 6, 4: 6, 20: 1}[keep]
    num_objects = len([*site.file(OBJECTS).iterdir()])
    versions, objects = prune(site.store, keep)
    assert versions == first - 1
    assert len([*site.file(OBJECTS).iterdir()]) == num_objects - objects
    assert bool(objects) == bool(versions)
    history = History(site.store)
    assert history.versions == [*range(first, 10)]
    named = {each.name for version in history.versions for each in history.require(version).objects}
    assert named == {f"{OBJECTS}/{path.name}" for path in site.file(OBJECTS).iterdir()}
    for version in history.versions[-keep:]:
        site.follow(f"joins at {version}", version)
    for version in range(1, 9):
        assert site.follow(f"at {version}").version == 9
    if first > 1:
        with pytest.raises(StoreError, match=f"it is not there; versions {first} to 9 are"):
            site.follow("too old", 1)
    assert prune(site.store, keep) == (0, 0)
    assert site.publish().version == 10


def test_a_publisher_does_not_rely_on_objects_that_a_pruner_may_remove(site: Site) -> None:
    site.publish()
    files = save(site.root / "never", tensors(5), 5)
    with mock.patch.object(ObjectStore, "create", side_effect=Crash), pytest.raises(Crash):
        publish(site.store, files, site.copy)
    assert prune(site.store, 1) == (0, 0), "they may belong to an upload"
    aged(site, 2)
    assert prune(site.store, 1) == (0, 0), "they are as old as the newest version"
    site.publish(0)
    create = ObjectStore.create

    def prunes_before(*args: Any) -> bool:
        prune(site.store, 1)
        return create(*args)

    with mock.patch.object(ObjectStore, "create", prunes_before):
        site.publish_again(files)
    site.follow("f")
    assert prune(ObjectStore(f"memory://{site.root}/empty"), 1) == (0, 0)


def test_left_over_objects_are_removed(site: Site) -> None:
    site.publish()
    files = save(site.root / "never", tensors(5), 5)
    with mock.patch.object(ObjectStore, "create", side_effect=Crash), pytest.raises(Crash):
        publish(site.store, files, site.copy)
    aged(site, 2)
    site.publish()
    assert prune(site.store, 5) == (0, 3)
    site.follow("f")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/policy", "valid: file, gs, memory, s3"),
        ("/mnt/policy", "give file:///mnt/policy"),
        ("S4://bucket", "did you mean 's3'"),
        ("file:///no/such/folder", "/no/such/folder"),
        ("file://relative", "relative"),
        ("s3://", "s3://"),
        ("s3://[", "s3://["),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match="URL: ") as caught:
        ObjectStore(url)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_obstore_a_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'weightsync\[store\]'"):
        ObjectStore("file:///tmp")


def test_folders_that_cannot_be_used_are_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"File exists: .*: give a folder to write to"):
        LocalFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="it has other files: give a new folder"):
        LocalFolder(tmp_path)
    site.publish()
    full = mock.patch.object(LocalFolder, "save", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(ConfigError, match="No space left on device: give a folder to write to, with"):
        site.follow("full")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="give a folder with safetensors files"):
        publish(site.store, tmp_path / "empty", site.copy)
    with pytest.raises(StoreError, match="it is not there; none is"):
        follow(ObjectStore(f"memory://{tmp_path}/empty"), site.folder("f"))


def test_a_process_that_keeps_a_folder_for_too_long_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.stores.local_folder.LONGEST_S", 0.1)
    site.publish()
    with (
        site.folder("f").locked(),
        pytest.raises(ConfigError, match=f"process {os.getpid()} changes it for 0.1 s: end it"),
    ):
        site.follow("f")
    assert site.follow("f").version == 1


def test_each_store_has_a_folder_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = default_folder("s3://one", "followed"), default_folder("s3://two", "followed")
    assert first != second
    assert first.parent == second.parent == tmp_path / "weightsync" / "followed"


def test_progress_ends_with_all_bytes(site: Site) -> None:
    told: list[tuple[int, int]] = []
    made = site.publish(tell=lambda *each: told.append(each))
    assert told[0] == (0, made.nbytes)
    assert told[-1] == (made.nbytes, made.nbytes)
    told.clear()
    found = follow(site.store, site.folder("f"), tell=lambda *each: told.append(each))
    assert told[-1] == (found.nbytes, found.nbytes) == (made.nbytes, made.nbytes)
