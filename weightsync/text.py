"""Counts, sizes, rates and times as texts."""

from __future__ import annotations

from collections.abc import Sequence


def count_text(count: int, noun: str) -> str:
    """Format a count with a regular noun: ``1 engine``, ``2 engines``, ``0 copies``."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def size_unit(nbytes: float) -> tuple[float, str]:
    """Return the unit in which `size_text` formats bytes: its bytes and its name."""
    power = 0
    while nbytes / 1000.0**power >= 999.5 and power < len(_UNITS) - 1:  # three digits round it to 1000
        power += 1
    return 1000.0**power, _UNITS[power]


def size_text(nbytes: float) -> str:
    """Format bytes with three digits, in units of 1000 as rates: ``17 B``, ``1.25 MB``, ``1.34 TB``."""
    scale, unit = size_unit(nbytes)
    return f"{nbytes / scale:.3g} {unit}"


def rate_text(gb_per_s: float) -> str:
    """Format a rate, given in 1e9 bytes per second: ``85.2 MB/s``, ``1.34 TB/s``."""
    return f"{size_text(gb_per_s * 1e9)}/s"


def time_text(seconds: float) -> str:
    """Format seconds: ``41 µs``, ``8.3 ms``, ``1.20 s``."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def table_text(rows: Sequence[Sequence[str]], *, num_left: int | None = None) -> str:
    """Align columns under each other, columns after the first `num_left` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if num_left is None or i < num_left else ">" for i in range(len(widths))]
    lines = (zip(row, signs, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in line).rstrip() for line in lines
    )
