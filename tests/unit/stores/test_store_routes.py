"""The choice of how a follower comes to a version, and of what a pruner may remove."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.stores.manifest import Manifest, Stored, VersionFile
from weightsync.stores.routes import first_needed, route, since_anchor

NAMES = "ab"


def stored(text: str, nbytes: int = 100) -> Stored:
    return Stored(hashlib.sha256(text.encode()).hexdigest(), nbytes)


def content(name: str, version: int) -> Stored:
    return stored(f"{name} {version}")


def delta(name: str, version: int, nbytes: int) -> Stored:
    return stored(f"delta {name} {version}", nbytes)


@st.composite
def stores(draw: st.DrawFn) -> Mapping[int, Manifest]:
    """Versions whose files are whole, changed, both or equal to the version before."""
    made: dict[int, Manifest] = {}
    for version in range(1, draw(st.integers(2, 9))):
        files = {}
        for name in NAMES:
            kind = draw(st.sampled_from(["whole", "delta", "both", "same"])) if version > 1 else "whole"
            before = made[version - 1].files[name].content if version > 1 else None
            its = before if kind == "same" and before else content(name, version)
            added = delta(name, version, draw(st.integers(1, 60))) if kind in ("delta", "both") else None
            base = before.sha256 if before and kind != "whole" else None
            files[name] = VersionFile(its, kind in ("whole", "both"), base, added)
        made[version] = Manifest(version, version - 1 or None, "p", files)
    return made


def ways(name: str, version: int, made: Mapping[int, Manifest], here: Stored | None) -> Iterator[int]:
    """Yield the bytes of every way to a file."""
    file = made[version].files[name]
    if file.content == here:
        yield 0
    if file.whole:
        yield file.content.nbytes
    if file.base:
        added = file.delta.nbytes if file.delta else 0
        yield from (added + nbytes for nbytes in ways(name, version - 1, made, here))


@given(stores(), st.data())
def test_a_route_has_the_fewest_bytes(made: Mapping[int, Manifest], data: st.DataObject) -> None:
    target = made[data.draw(st.sampled_from(sorted(made)))]
    at = data.draw(st.sampled_from([None, *range(1, target.version + 1)]))
    for name in NAMES:
        here = made[at].files[name].content if at else None
        found = route(name, target, made.get, {here}.__contains__)
        assert found
        assert found.nbytes == min(ways(name, target.version, made, here))
        fetched = () if found.start == here else (found.start,)
        assert found.nbytes == sum(each.nbytes for each in (*fetched, *found.changes))


@given(stores(), st.data())
def test_what_is_left_after_pruning_brings_followers_to_each_kept_version(
    made: Mapping[int, Manifest], data: st.DataObject
) -> None:
    oldest = data.draw(st.sampled_from(sorted(made)))
    first = first_needed(made[oldest], made.get)
    left = {version: manifest for version, manifest in made.items() if version >= first}
    for version in range(oldest, max(made) + 1):
        for name in NAMES:
            whole = route(name, made[version], made.get, lambda _: False)
            assert route(name, left[version], left.get, lambda _: False) == whole
    if first < oldest:  # nothing is kept in vain
        less = {version: manifest for version, manifest in left.items() if version > first}
        assert None in [route(name, made[oldest], less.get, lambda _: False) for name in NAMES]


def test_a_version_that_is_not_there_ends_a_route() -> None:
    files = {"a": VersionFile(content("a", 2), False, content("a", 1).sha256, delta("a", 2, 5))}
    second = Manifest(2, 1, "p", files)
    assert route("a", second, lambda _: None, lambda _: False) is None
    other = Manifest(1, None, "p", {"a": VersionFile(content("a", 7), True)})
    assert route("a", second, {1: other}.get, lambda _: False) is None, "its base has other bytes"


def test_deltas_since_the_last_anchor_are_counted() -> None:
    made = {1: Manifest(1, None, "p", {"a": VersionFile(content("a", 1), True)})}
    for version in range(2, 5):
        base, its = content("a", version - 1).sha256, content("a", version)
        files = {"a": VersionFile(its, version == 3, base, delta("a", version, 10 * version))}
        made[version] = Manifest(version, version - 1, "p", files)
    assert [since_anchor(made[version], made.get) for version in made] == [(0, 0), (1, 20), (0, 0), (1, 40)]


@pytest.mark.parametrize("name", ["../a", "a/b", "", "..", ".", "a\0b"])
def test_a_manifest_only_names_files_of_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a file"):
        Manifest(1, None, "p", {name: VersionFile(content("a", 1), True)})


def test_an_object_is_named_by_a_hash() -> None:
    with pytest.raises(ValueError, match="is no sha256"):
        Stored("../" * 20 + "etcd", 1)


def test_each_byte_of_a_manifest_counts() -> None:
    data = Manifest(1, None, "p", {"a": VersionFile(content("a", 1), True)}).encode()
    assert Manifest.decode(data, 1).encode() == data
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for wrong in (damaged, data[:at]):
            with pytest.raises(ValueError, match="sha256 is"):
                Manifest.decode(wrong, 1)
