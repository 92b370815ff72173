"""Reports of updates and of healing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Protocol

from weightsync.protocol.timing import Span
from weightsync.text import count_text, rate_text, size_text, table_text, time_text

Distance = Literal["same GPU or slot", "same host", "other host"]
DIRECT = "direct"
"""The route of an engine that reads the trainers' memory. The quantised formats may follow."""


def is_direct(route: str) -> bool:
    """Return True if a route, as in `SyncReport.routes`, is `DIRECT`."""
    return route.startswith(DIRECT)


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes that one engine rank receives from one sender in an update.

    Attributes:
        source: a trainer rank, or a holder that broadcasts or passes data on.
        target: the engine rank, such as ``engine e0 rank 0``.
        distance: how far apart the two are.
        nbytes: bytes per update.
    """

    source: str
    target: str
    distance: Distance
    nbytes: int


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """Coverage of one component on one engine: version, tensors, route and proof.

    Attributes:
        engine: name of the engine.
        component: ``model``, ``draft``, or ``adapter math``; of another model ``reward``, ``reward: draft``.
        version: the served version, 0 if none. A draft has the version of the model.
        num_tensors: tensors that updates cover, including frozen tensors.
        num_frozen: tensors that updates compare and do not move.
        nbytes: bytes of all tensors, in the dtypes that travel.
        route: as `SyncReport.routes`; empty if nothing moves.
        conversion: ``identity``, or a list of ``cast``, with the number of tensors, both dtypes and the
            place, ``quantise``, with the formats, and ``load``, if the engine's own loader gets the tensors.
            Empty if nothing moves.
        proof: what the last update compared, as `SyncReport.proofs`; empty if this was another version, or if
            the engine has slept since. If the engine was healed since, the same digests were compared.
    """

    engine: str
    component: str
    version: int
    num_tensors: int
    num_frozen: int
    nbytes: int
    route: str
    conversion: str = ""
    proof: str

    @classmethod
    def of(
        cls,
        engine: str,
        component: str,
        tensors: Collection[_Sized],
        route: str,
        conversion: str,
        *,
        num_frozen: int = 0,
        version: int = 0,
        proof: str = "",
    ) -> Covered:
        """Make the row of a component with `tensors`. The defaults describe a component before a move."""
        return cls(
            engine=engine,
            component=component,
            version=version,
            num_tensors=len(tensors),
            num_frozen=num_frozen,
            nbytes=sum(meta.nbytes for meta in tensors),
            route=route,
            conversion=conversion,
            proof=proof,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table below `COVERAGE_HEAD`."""
        is_moved = self.num_frozen < self.num_tensors
        way = (DIRECT if is_direct(self.route) else "broadcast") if self.route else "none"
        return (
            self.engine,
            self.component,
            f"{self.num_tensors}" + (f", {self.num_frozen} frozen" if self.num_frozen and is_moved else ""),
            size_text(self.nbytes),
            way if is_moved else "frozen",
            self.conversion or "none",
            f"{self.version}" if self.version else "none",
            self.proof or "not compared",
        )

    def __str__(self) -> str:
        some = "all" if self.num_frozen == self.num_tensors else f"{self.num_frozen} of them"
        frozen = f", {some} frozen" if self.num_frozen else ""
        told = f"version {self.version}, {self.proof or 'not compared'}" if self.version else "no version"
        changed = "" if self.conversion in ("", "identity", "load") else f"; {self.conversion}"
        return (
            f"{self.engine}, {self.component}: {told}; "
            f"{count_text(self.num_tensors, 'tensor')}{frozen}, {size_text(self.nbytes)}{changed}"
        )


COVERAGE_HEAD = ("engine", "component", "tensors", "bytes", "route", "conversion", "version", "verified")


def coverage_cells(rows: Sequence[Covered]) -> list[tuple[str, ...]]:
    """Return the cells of rows. Engines with equal cells share a row."""
    engines: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in (row.cells for row in rows):
        engines.setdefault(tuple(cells), []).append(name)
    return [(_names(names), *cells) for cells, names in engines.items()]


def coverage_table(rows: Sequence[Covered], *, planned: bool = False) -> str:
    """Return a table of the coverage of engines, below `COVERAGE_HEAD`.

    If `planned`, no version is served yet, and the table has no versions.
    """
    lines = [COVERAGE_HEAD, *coverage_cells(rows)]
    if planned:
        lines = [line[: COVERAGE_HEAD.index("version")] for line in lines]
    return table_text(lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


@dataclass(frozen=True, slots=True)
class Density:
    """How much of a group of tensors changed from one version to the next, by a sample.

    Attributes:
        changed: the fraction of elements that changed, 0 to 1.
        num_sampled: the sampled elements, about 1/64 of all.
        nbytes: the bytes of the group's tensors.
        delta_nbytes: the bytes of a delta with so many changes, spread evenly.
    """

    changed: float
    num_sampled: int
    nbytes: int
    delta_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """Report of one update or refill.

    ``print(report)`` prints one line. ``report.to_dict()`` is the content of a run's ``report.json``.

    Attributes:
        version: the version that was committed.
        nbytes: bytes of the model, counted once for all engines, without frozen tensors.
        seconds: wall clock time of the whole call.
        phases: seconds of ``publish``, ``pause``, ``move``, ``verify`` and ``commit``, by the driver's clock.
            If trainers are read in place, ``publish`` includes ``pause``, and ``move`` includes the trainers'
            digests. If engines move experts, ``layout`` is the time to follow them.
        verified: True: engines that hold other bytes than the trainers published do not serve `version`.
        engines: the version that each engine serves.
        states: the state of each engine.
        failures: by engine, the error of the engine's last update or refill, if that failed.
        digest: 64-bit digest of the model, 16 hexadecimal digits.
        num_buckets: buckets that were broadcast; 0 if engines read all tensors directly.
        epoch: number of the connect that made the plan.
        connect_phases: seconds of each phase of this connect. ``join`` is part of ``attach``.
        routes: by engine, ``direct``, followed by the formats that are quantised on the way, or the reason
            why the engine takes broadcasts. An engine that has just joined gets a route before the next
            update, and the text says so.
        proofs: by engine, what was last compared with the published weights: ``live weights``, or ``what its
            loader got`` if the engine's own loader writes the weights. For a quantised engine, ``live weights
            with what was quantised`` of the right tensors, if the engine can tell, and the number of equal
            engines with the same live bytes. If the engine was filled with copies of these bytes, ``live
            weights with what its loader had made of them``.
        bytes_from: in a refill, the bytes that were read from each holder.
        ways: in a refill, how each holder was read: ``own``, ``mapped``, ``rdma``, ``tcp``, ``zeromq`` or
            ``curve``; all ways, joined by ``and``, if ranks or hosts read a holder in several.
        spans: by process, names and durations: the phases of ``driver``, ``publish`` of ``trainer 0``,
            ``move`` of ``holder 0``, if versions are staged also the parts' ``save``, ``delta``, ``copy`` and
            ``digest``, ``load`` and ``verify`` of ``engine e0 rank 0``. A process that failed
            has no spans.
        components: the reports of all components, if the update had several. The other fields are of the
            first component.
        checkpoint: name of the checkpoint that was published instead of trainers' weights; else empty.
        nonfinite: by tensor, the number of elements that are NaN or Inf; see ``SyncConfig.nonfinite``.
        density: with ``SyncConfig.density``, how much changed since the version before, by group of tensors:
            ``model.layers.*.mlp.up_proj.weight`` is one. Empty in the first update after a connect.
        peak_memory: by phase and GPU, the most bytes in use on the whole GPU, sampled every 5 ms. Empty if no
            engine slept before the update, and without GPUs.
    """

    version: int
    nbytes: int
    seconds: float
    phases: Mapping[str, float]
    verified: bool
    engines: Mapping[str, int]
    states: Mapping[str, str]
    failures: Mapping[str, str]
    digest: str
    num_buckets: int
    epoch: int
    connect_phases: Mapping[str, float]
    routes: Mapping[str, str] = field(default_factory=dict)
    proofs: Mapping[str, str] = field(default_factory=dict)
    bytes_from: Mapping[str, int] = field(default_factory=dict)
    ways: Mapping[str, str] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    components: Mapping[str, SyncReport] = field(default_factory=dict)
    checkpoint: str = ""
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    density: Mapping[str, Density] = field(default_factory=dict)
    peak_memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """`nbytes` over the seconds of the ``move`` phase, in 1e9 bytes per second; 0 without a move."""
        seconds = self.phases.get("move", 0.0)
        return self.nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return all fields and `gb_per_s`, as values that ``json.dumps`` takes."""
        spans = {name: [asdict(span) for span in spans] for name, spans in self.spans.items()}
        components = {name: report.to_dict() for name, report in self.components.items()}
        return _plain(self) | {"spans": spans, "components": components, "gb_per_s": self.gb_per_s}

    def metrics(self, prefix: str = "weightsync/") -> dict[str, float]:
        """Return numbers for a tracker, such as ``weightsync/sync_s``: ``wandb.log(report.metrics())``.

        If the update had several components, the names of a component's numbers start with the prefix and the
        component, such as ``weightsync/reward/sync_s`` and ``weightsync/adapter_math/sync_s``.
        """
        numbers = {f"{prefix}{phase}_s": seconds for phase, seconds in self.phases.items()}
        numbers |= {
            f"{prefix}sync_s": self.seconds,
            f"{prefix}move_bytes_per_s": self.gb_per_s * 1e9,
            f"{prefix}nbytes": self.nbytes,
            f"{prefix}version": self.version,
            f"{prefix}num_serving": self._num_serving,
            f"{prefix}num_failures": len(self.failures),
            f"{prefix}num_nonfinite": sum(self.nonfinite.values()),
        }
        if self.density:
            numbers[f"{prefix}delta_nbytes"] = sum(each.delta_nbytes for each in self.density.values())
        for name, report in self.components.items():
            numbers |= report.metrics(f"{prefix}{name.replace(' ', '_')}/")
        return numbers

    @property
    def _num_serving(self) -> int:
        return sum(version == self.version for version in self.engines.values())

    def __str__(self) -> str:
        proof = "verified" if self.verified else "not verified"
        failed = "".join(f"; {engine} failed: {error}" for engine, error in sorted(self.failures.items()))
        named = f"version {self.version}" + (f" ({self.checkpoint})" if self.checkpoint else "")
        engines = count_text(len(self.engines), "engine")
        moved = f" (moved at {rate_text(self.gb_per_s)})" if self.gb_per_s else ""
        return (
            f"{named}: {size_text(self.nbytes)} to {self._num_serving} of {engines}"
            f" in {self.seconds:.3g} s{moved}, {proof}{self._left_out()}{failed}"
        )

    def _left_out(self) -> str:
        """Engines that do not serve the version and did not fail in this update, by state."""
        left: dict[str, list[str]] = {}
        for engine, version in sorted(self.engines.items()):
            if version != self.version and engine not in self.failures:
                held = f" with version {version}" if version else ""
                left.setdefault(self.states[engine] + held, []).append(engine)
        return "".join(f"; {state}: {_names(engines)}" for state, engines in sorted(left.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class HealReport:
    """Report of one engine that failed and was healed.

    Times are seconds since 1970. `died_at` is wall clock time; the later times are `died_at` plus the seconds
    of a monotonic clock.

    Attributes:
        engine: name of the engine.
        cause: why the engine failed.
        version: the served version; 0 if the engine waits for the next update.
        died_at: when the failure was found.
        respawned_at: when the new process was ready; None if the engine has the same process.
        serving_at: when the engine served again; None if the engine waits for the next update.
        bytes_from: bytes that were read from each holder; empty if an update came first.
        ways: how each holder was read: ``own``, ``mapped``, ``rdma``, ``tcp``, ``zeromq`` or ``curve``.
        gb_per_s: the model's bytes over the seconds of reading and loading, in 1e9 bytes per second.
        verified: True if the engine's digests were compared and equal the digests of the committed version.
    """

    engine: str
    cause: str
    version: int
    died_at: float
    respawned_at: float | None
    serving_at: float | None
    bytes_from: Mapping[str, int]
    ways: Mapping[str, str]
    gb_per_s: float
    verified: bool

    def to_dict(self) -> dict[str, object]:
        """Return all fields, as values that ``json.dumps`` takes."""
        return _plain(self)

    def __str__(self) -> str:
        new = "" if self.respawned_at is None else f", new process {self.respawned_at - self.died_at:.1f} s"
        if self.serving_at is None:
            return f"engine {self.engine} is ready for the next version{new}; it had failed: {self.cause}"
        read = ", ".join(
            f"{size_text(nbytes)} from {holder} ({self.ways.get(holder, '')})"
            for holder, nbytes in self.bytes_from.items()
        )
        how = f"{read}, {rate_text(self.gb_per_s)}, verified" if read else "an update"
        return (
            f"engine {self.engine} serves version {self.version} again after"
            f" {time_text(self.serving_at - self.died_at)}{new}; {how}; it had failed: {self.cause}"
        )


def _plain(report: SyncReport | HealReport) -> dict[str, object]:
    values = {spec.name: getattr(report, spec.name) for spec in fields(report)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
