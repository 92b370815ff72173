"""Results of a bench: median times of each rank, and floors of the links."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from weightsync import LinkRates, efficiency
from weightsync.protocol.timing import seconds_of
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.report.run_report import packages_here, this_host
from weightsync.report import Link, SyncReport
from weightsync.text import count_text, size_text, table_text, time_text

_HEAD = ("process", "what", "median", "least", "most", "bytes", "GB/s", "floor", "reached")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One phase or span of a process, over all measured updates.

    Attributes:
        what: a phase or the whole ``update`` of the driver, or a span of a rank.
        median, least, most: seconds.
        nbytes: bytes that the process moved; 0 if another row has the bytes.
        floor_s: least seconds for the links, by the given rates; 0 without rates.
    """

    process: str
    what: str
    median: float
    least: float
    most: float
    nbytes: int = 0
    floor_s: float = 0.0

    @classmethod
    def of(
        cls, process: str, what: str, seconds: Sequence[float], nbytes: int = 0, floor_s: float = 0.0
    ) -> BenchRow:
        """Make a row from the seconds of each update."""
        return cls(process, what, statistics.median(seconds), min(seconds), max(seconds), nbytes, floor_s)

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes per second in the median update."""
        return self.nbytes / self.median / 1e9 if self.median else 0.0

    def cells(self) -> tuple[str, ...]:
        """The cells of the row as text, empty where unknown."""
        return (
            self.process,
            self.what,
            *map(time_text, (self.median, self.least, self.most)),
            size_text(self.nbytes) if self.nbytes else "",
            f"{self.gb_per_s:.3g}" if self.nbytes else "",
            time_text(self.floor_s) if self.floor_s else "",
            f"{self.floor_s / self.median:.0%}" if self.floor_s and self.median else "",
        )


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Result of a bench. `str()` is a table of the rows.

    Attributes:
        devices: the devices of trainers and engines.
        engines: the `info` of each engine at the start.
        routes: as in `SyncReport`.
        nbytes: payload bytes of the model.
        rates: the link rates behind the floors, if given.
        links: the bytes of one update by sender and engine rank.
    """

    name: str
    devices: str
    num_updates: int
    nbytes: int
    engines: Mapping[str, Mapping[str, str]]
    routes: Mapping[str, str]
    rates: LinkRates | None
    links: Sequence[Link]
    rows: Sequence[BenchRow]
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    host: Mapping[str, str | int | None] = field(default_factory=this_host)
    packages: Mapping[str, str] = field(default_factory=packages_here)

    @classmethod
    def of(
        cls,
        name: str,
        devices: str,
        engines: Mapping[str, Mapping[str, str]],
        updates: Sequence[SyncReport],
        links: Sequence[Link],
        cluster: tuple[str, HostSpec] | None,
    ) -> BenchReport:
        """Make a report of `updates`, at least one, in which no engine failed."""
        last, rates, floors = updates[-1], None, {}
        if cluster:
            rates = cluster[1].link_rates(cluster[0])
            found = efficiency(links, last, rates, gpus_per_host=cluster[1].gpus_per_host)
            floors = {share.rank: share.floor_s for share in found}
        return cls(
            name=name,
            devices=devices,
            num_updates=len(updates),
            nbytes=last.nbytes,
            engines=engines,
            routes=last.routes,
            rates=rates,
            links=links,
            rows=[*_driver_rows(updates), *_rank_rows(updates, links, floors)],
        )

    def write(self, path: Path) -> None:
        """Write the report to `path` as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        kinds = (
            f"{name}: {info['kind']}, {self.routes.get(name, '')}" for name, info in self.engines.items()
        )
        what = f"{count_text(self.num_updates, 'update')} of {size_text(self.nbytes)}"
        head = f"{self.name}: {what}, all verified, on {self.devices}"
        floors = [f"floors are those of {self.rates.name}"] if self.rates else []
        table = table_text([_HEAD, *(row.cells() for row in self.rows)], num_left=2)
        return "\n".join([head, *kinds, table, *floors])


def _driver_rows(updates: Sequence[SyncReport]) -> Iterator[BenchRow]:
    nbytes = updates[-1].nbytes
    for phase in updates[-1].phases:
        moved = nbytes if phase == "move" else 0
        yield BenchRow.of("driver", phase, [update.phases[phase] for update in updates], moved)
    yield BenchRow.of("driver", "update", [update.seconds for update in updates], nbytes)


def _rank_rows(
    updates: Sequence[SyncReport], links: Sequence[Link], floors: Mapping[str, float]
) -> Iterator[BenchRow]:
    taken: dict[str, int] = {}
    for link in links:
        taken[link.target] = taken.get(link.target, 0) + link.nbytes
    for process, spans in updates[-1].spans.items():
        if process == "driver":
            continue
        for what in dict.fromkeys(span.name for span in spans):
            seconds = [seconds_of(update.spans[process], what) for update in updates]
            of_links = (taken.get(process, 0), floors.get(process, 0.0)) if what == "load" else ()
            yield BenchRow.of(process, what, seconds, *of_links)
