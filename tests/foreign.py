"""Bytes that another process may send in place of a message."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

NESTED = 20_000
"""Levels of nesting: more than Python recurses, and in a frame of every socket that has a limit of 64 kB."""
NASTY = {
    "nothing": b"",
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "a key that is not UTF-8": b"\x81\xa1\xff\x01",
    "a tag that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "a longer text than there is": b"\xdb\xff\xff\xff\xff",
    "longer bytes than there are": b"\xc6\xff\xff\xff\xff",
    "a longer list than there is": b"\xdd\xff\xff\xff\xff",
    "a longer map than there is": b"\xdf\xff\xff\xff\xff",
    "deep lists": b"\x91" * NESTED,
    "deep maps": b"\x81\xa1a" * NESTED,
    "deep keys": b"\x81" * NESTED,
    "a map as a key": b"\x81\x80\x01",
    "no type of MessagePack": b"\xc1",
    "deep JSON": b"[" * NESTED,
    "JSON that is not UTF-8": b'{"type": "\xff"}',
    "half a surrogate": b'"\\ud800"',
    "a pickle": b"\x80\x04K\x01.",
}


def foreign(valid: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw bytes: random ones, nasty ones, and parts of `valid` messages with something wrong."""
    nasty, message = st.sampled_from([*NASTY.values()]), st.sampled_from([*valid])

    def damaged(data: bytes) -> st.SearchStrategy[bytes]:
        at = st.integers(0, max(0, len(data) - 1))
        put = nasty | st.binary(min_size=1, max_size=8)
        return at.map(lambda i: data[:i]) | st.builds(
            lambda i, new, skip: data[:i] + new + data[i + skip :], at, put, st.integers(0, 4)
        )

    return st.binary(max_size=300) | nasty | message.flatmap(damaged)
