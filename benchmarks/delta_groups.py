"""What a choice for each group of tensors would gain over a choice for each link, for `bench_deltas`."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.density import group

__all__ = ["Groups"]

Bytes = npt.NDArray[np.uint8]
LINKS = [10 ** (step / 20 - 2) for step in range(101)]
"""Rates of links in Gb/s, from 0.01 to 1000."""


@dataclass
class _Costs:
    """A group's deltas over all steps: CPU seconds to make and to use, bytes, and changed elements."""

    spans: list[Span] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def whole_s(self, rate: float) -> float:
        """Return the seconds of the whole group over a link of `rate` bytes per second."""
        return self.nbytes / rate

    def delta_s(self, rate: float) -> float:
        """Return the seconds of a delta."""
        return statistics.median(self.seconds) + statistics.median(self.sizes) / rate


class Groups:
    """Codes each group of tensors by itself, in one thread."""

    def __init__(self, spans: Mapping[str, Span]) -> None:
        """`spans`: the place of each tensor."""
        self._costs: defaultdict[str, _Costs] = defaultdict(_Costs)
        for name, span in spans.items():
            self._costs[group(name)].spans.append(span)

    def run(self, old: Bytes, new: Bytes) -> None:
        """Code one pair of versions."""
        memory = old.copy()
        for costs in self._costs.values():
            began = time.process_time()
            changes = Changes.between(costs.spans, old, new)
            sent = np.empty(changes.nbytes, np.uint8)
            changes.write(sent)
            Changes.decode(costs.spans, sent).apply(memory)
            costs.seconds.append(time.process_time() - began)
            costs.sizes.append(len(sent))
            costs.changed.append(_share(costs.spans, old, new))
        assert (memory == new).all()

    def row(self) -> dict[str, object]:
        """Return the groups' changes, and the greatest gain of a choice for each group over all links.

        A group that is sent whole costs nothing but the link.
        """
        costs = [*self._costs.values()]
        changed = [100 * statistics.median(each.changed) for each in costs]
        gain, gbit = max((_gain(costs, gbit), gbit) for gbit in LINKS)
        return {
            "groups": len(costs),
            "changed % by group": f"{min(changed):.3f}-{max(changed):.3f}",
            "gain %": 100 * gain,
            "at Gb/s": gbit,
        }


def _share(spans: Sequence[Span], old: Bytes, new: Bytes) -> float:
    its = [slice(span.offset, span.offset + span.nbytes) for span in spans]
    num = sum(int(np.count_nonzero(old[at].view(np.uint16) != new[at].view(np.uint16))) for at in its)
    return 2 * num / sum(span.nbytes for span in spans)


def _gain(costs: Sequence[_Costs], gbit: float) -> float:
    rate = gbit / 8 * 1e9
    pairs = [(each.whole_s(rate), each.delta_s(rate)) for each in costs]
    whole, delta = map(sum, zip(*pairs, strict=True))
    return 1.0 - sum(map(min, pairs)) / min(whole, delta)
