"""Live digests of engines alike, compared by rank and kind."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from weightsync.driver.verifying.live_digests import LiveDigests
from weightsync.protocol.messages import LiveDigest, LoadReport

FIRST, SECOND = np.arange(3, dtype=np.uint64), np.arange(1, 4, dtype=np.uint64)


def loaded(**engines: str) -> dict[str, LoadReport]:
    """Engines with a letter for each rank's digest; upper case is another kind, a dot none."""
    return {
        name: LoadReport(
            FIRST, (), [None if d == "." else LiveDigest("AB"[d.isupper()], d.lower()) for d in digests]
        )
        for name, digests in engines.items()
    }


def blamed(live: LiveDigests, expected: np.ndarray = FIRST, **engines: str) -> dict[str, list[str]]:
    found = live.unlike(loaded(**engines), expected)
    return {name: [text.split()[4].rstrip(",") for text in texts] for name, texts in found.items()}


def test_ranks_that_hold_other_bytes_than_engines_alike_are_named() -> None:
    assert blamed(LiveDigests(), a="xy", b="xy", c="xz") == {"c": ["1"]}
    assert blamed(LiveDigests(), a="x", b="X", c="x") == {}
    assert blamed(LiveDigests(), a="x", b="Y", c=".", d="x.") == {}


def test_copies_are_right_if_a_loader_made_the_same_of_these_tensors() -> None:
    live = LiveDigests()

    def copied(expected: np.ndarray, digest: str) -> dict[str, list[str]]:
        reports = {name: replace(each, are_copied=True) for name, each in loaded(a=digest).items()}
        return live.unlike(reports, expected)

    assert copied(FIRST, "x").keys() == {"a"}, "no loader has been seen"
    assert blamed(live, b="x") == {}
    assert copied(FIRST, "x") == {}
    assert copied(FIRST, "y").keys() == {"a"}
    assert copied(FIRST, "X").keys() == {"a"}, "another kind"
    assert copied(SECOND, "x").keys() == {"a"}, "other tensors"


def test_without_a_majority_all_are_named() -> None:
    live = LiveDigests()
    assert blamed(live, a="x", b="y") == {"a": ["0"], "b": ["0"]}
    assert blamed(live, a="x") == {}, "nobody was right before"


def test_who_comes_later_is_compared_with_those_before_until_other_tensors_come() -> None:
    live = LiveDigests()
    assert blamed(live, a="x", b="x") == {}
    assert blamed(live, c="y") == {"c": ["0"]}
    assert blamed(live, c="y", d="y") == {"c": ["0"], "d": ["0"]}
    assert blamed(live, c="x") == {}
    assert {name: live.num_alike(name) for name in "abcd"} == {"a": 2, "b": 2, "c": 2, "d": 0}
    assert blamed(live, SECOND, a="y", b="y") == {}
    assert (live.num_alike("a"), live.num_alike("c")) == (1, 0)
