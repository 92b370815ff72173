"""What deltas would cost on a link between hosts, for ``weightsync plan --link --density``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.deltas.tiles import expected_nbytes
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta
from weightsync.text import size_text, time_text

READ_GB_PER_S, USE_GB_PER_S = 27.0, 42.0
"""Of one GPU that compares two versions in the host's memory, and that rebuilds one: bytes of the version."""
WRITE_GB_PER_S = 3.8
"""Of one holder that writes a delta, in bytes of the delta.

With 5 % changed, a GB is made in 0.057 s, and used in 0.024 s. Measured were 0.056 and 0.025:
benchmarks/results/deltas-8gib-a2be80c3-1xh200-2026-11-29.json.
"""
PUBLISH_GB_PER_S, SAVE_GB_PER_S, LAND_GB_PER_S = 52.0, 9.6, 28.0
"""Of one trainer that publishes, of one thread that saves a version without a delta, and of one engine rank
that digests a version and copies it to the GPU.

All together, 16.4 GB with 1 % changed take 2.2 s, and whole 15.6 s, where the link has 1.27 GB/s. Measured
were 2.3 and 15.6: benchmarks/results/hosts-deltas-8b-4a905f55-2xh200-2026-11-30.json.
"""
_UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link between hosts, and what changes between two versions.

    Attributes:
        text: the rate as it was given.
        rate: bytes per second.
        density: the fraction of elements that change.
    """

    text: str
    rate: float
    density: float

    @staticmethod
    def parse(link: str | None, density: float | None) -> SlowLink | None:
        """Read the two options. Returns None without both. Raises ConfigError that names the option."""
        if link is None and density is None:
            return None
        if link is None or density is None:
            raise ConfigError("--density" if link else "--link", None, "give both, as 10gbit and 0.02")
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(mbit|gbit)", link.lower())
        if not found or float(found[1]) == 0:
            raise ConfigError("--link", link, "give a rate such as 400mbit or 10gbit")
        if not 0 <= density <= 1:
            raise ConfigError("--density", density, "give a fraction of 0 to 1, such as 0.02")
        return SlowLink(link, float(found[1]) * _UNITS[found[2]], density)


def explain_deltas(
    tensors: Sequence[TensorMeta], num_trainers: int, num_ranks: int, link: SlowLink
) -> list[str]:
    """Compare a whole version with a delta, over the link to one host with `num_ranks` engine ranks."""
    whole = sum(meta.nbytes for meta in tensors)
    delta = sum(expected_nbytes(meta.numel, meta.itemsize, link.density) for meta in tensors)
    make_s = (whole / READ_GB_PER_S + delta / WRITE_GB_PER_S) / num_trainers / 1e9
    code_s = make_s + whole / USE_GB_PER_S / num_ranks / 1e9
    both_s = whole * (1 / PUBLISH_GB_PER_S / num_trainers + 1 / LAND_GB_PER_S / num_ranks) / 1e9
    whole_s = whole / link.rate + both_s + whole / SAVE_GB_PER_S / num_trainers / 1e9
    delta_s = delta / link.rate + both_s + code_s
    pays = f"{whole_s / delta_s:.1f} times as fast" if delta_s < whole_s else "does not pay: sync.deltas none"
    return [
        f"{link.density:.3g} of all elements change, {link.text} to each host of engines, staged",
        f"whole  {size_text(whole):>8}  {time_text(whole_s)}",
        f"delta  {size_text(delta):>8}  {time_text(delta_s)}, with {time_text(code_s)} to make and to use it",
        pays,
    ]
