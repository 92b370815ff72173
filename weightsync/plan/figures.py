"""Bytes and seconds as text."""

from __future__ import annotations

__all__ = ["count_text", "size_text", "time_text"]


def count_text(count: int, noun: str) -> str:
    """``1 engine``, ``2 engines``, ``0 copies``: regular nouns."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def size_text(nbytes: int) -> str:
    """``17 B``, ``1.5 GiB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def time_text(seconds: float) -> str:
    """``41 µs``, ``8.3 ms``, ``1.20 s``."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
