"""Forecasts what an update would move and how fast it could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.plan import Cluster, Explanation, Layout, Members, TensorMeta, same_dtype_tensors
from weightsync.plan.figures.broadcast_figures import explain_broadcast
from weightsync.plan.layout.conversion import IDENTITY, casts, conversion_of, dtypes
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.formats import Quantization
from weightsync.plan.layout.match import match
from weightsync.recipes.config.recipe import ModelSpec, MoeSpec, Recipe, TrainerSpec
from weightsync.recipes.forecast.deltas import SlowLink, explain_deltas
from weightsync.recipes.forecast.engine_reads import reads_floor
from weightsync.recipes.forecast.grids import TrainersGrid, engine_layout
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.forecast.parallel import EngineParallel, Fsdp, MegatronOrder, TrainerParallel, Zero
from weightsync.recipes.forecast.quantised import INT4, explain_formats, formats_text, why_whole
from weightsync.recipes.forecast.shapes import MixtureShape, ModelShape, checkpoint_tensors
from weightsync.report import DIRECT, Covered, coverage_table
from weightsync.text import count_text, size_text, time_text

_MOST_REASONS = 3

_Row = tuple[str, Sequence[TensorMeta], str, str]
"""A component, with tensors, route and conversion."""


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine of a forecast. `quantization`: of the checkpoint, None if it is not quantised."""

    name: str
    parallel: EngineParallel
    quantization: Quantization | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Scene:
    """The trainers, engines and hosts of a forecast, and their layouts, which are made on use.

    Attributes:
        tensors: the tensors of the model, in its checkpoint.
        apart: engines have their own GPUs, after the trainers'; else both share GPUs, from the first on.
        offloaded: trainers publish into host memory.
        cluster: name and hosts of the cluster. Hosts are filled in order. None gives no times.
        link: a slow link to each host of engines, over which deltas are compared with whole versions.
    """

    name: str
    model: ModelShape
    tensors: Sequence[TensorMeta]
    trainers: TrainerParallel
    engines: Sequence[PlannedEngine]
    apart: bool = False
    offloaded: bool = False
    cluster: tuple[str, HostSpec] | None = None
    sync: SyncConfig = field(default_factory=SyncConfig)
    link: SlowLink | None = None

    @cached_property
    def members(self) -> Members:
        """The members, with one holder for each GPU."""
        num_trainers = self.trainers.num_ranks
        start, engines = num_trainers if self.apart else 0, []
        for engine in self.engines:
            engines.append((engine.name, tuple(range(start, start := start + engine.parallel.num_ranks))))
        return Members(max(num_trainers, start), tuple(range(num_trainers)), tuple(engines))

    @cached_property
    def source(self) -> TrainersGrid:
        """The trainers' layout."""
        return TrainersGrid(self.tensors, self.model, self.trainers)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each engine. Engines alike share one."""
        made: dict[tuple[EngineParallel, Quantization | None], Layout] = {}
        for kind in dict.fromkeys((engine.parallel, engine.quantization) for engine in self.engines):
            made[kind] = engine_layout(_held(self.tensors, kind[1]), self.model, kind[0])
        return {engine.name: made[engine.parallel, engine.quantization] for engine in self.engines}

    @cached_property
    def why_whole(self) -> str:
        """Why quantised engines take whole tensors; "" if they read only their own parts, or none is.

        One engine that takes whole tensors speaks for all.
        """
        members = self.members
        kinds = dict.fromkeys((self.layouts[e.name], e.quantization) for e in self.engines if e.quantization)
        if not kinds:
            return ""
        if self.sync.mode != "auto":
            return f"sync.mode is {self.sync.mode}"
        if members.num_holders == 1:
            return "the engine's holder has the trainer's memory on the same GPU"
        if casts(dtypes(self.tensors), next(iter(kinds))[0].tensors):
            return "they are cast"
        per_host = self.cluster[1].gpus_per_host if self.cluster else members.num_holders
        gpus_used = [*members.trainers]
        for engine, (_, gpus) in zip(self.engines, members.engines, strict=True):
            gpus_used += gpus if engine.quantization else ()
        if len({gpu // per_host for gpu in gpus_used}) > 1:
            return "some trainers are on other hosts"
        return next(filter(None, (why_whole(*kind) for kind in kinds)), "")


def recipe_scene(
    recipe: Recipe, cluster: tuple[str, HostSpec] | None, *, offloaded: bool, link: SlowLink | None = None
) -> Scene:
    """Return the scene that `recipe` would run."""
    if recipe.trainers.lora:
        raise ConfigError("--cluster", cluster and cluster[0], "leave it out: it is for models")
    quantizations = {"none": None, "int4": Quantization.read(INT4)}
    model = _shape(recipe.model, recipe.draft.num_hidden_layers if recipe.draft else 0)
    return Scene(
        name=recipe.name,
        model=model,
        tensors=checkpoint_tensors(model),
        trainers=_trainers(recipe.trainers, is_mixture=recipe.model.moe is not None),
        engines=[
            PlannedEngine(
                name, EngineParallel(tp=spec.tensor_parallel_size), quantizations[spec.quantization]
            )
            for name, spec in recipe.engine_specs.items()
        ],
        apart=recipe.placement == "disaggregated",
        offloaded=offloaded or recipe.loop.sleep > 0,
        cluster=cluster,
        sync=recipe.sync,
        link=link,
    )


def forecast_adapter(recipe: Recipe) -> str:
    """Describe an update of the recipe's adapter."""
    lora, tensors = recipe.trainers.lora, checkpoint_tensors(_shape(recipe.model))
    assert lora
    pairs = _adapter_tensors(lora.rank, tensors)
    engines = count_text(len(recipe.engine_specs), "engine")
    moved = f"{count_text(len(pairs), 'tensor')}, {size_text(sum(meta.nbytes for meta in pairs))}"
    return "\n".join(
        [
            f"{recipe.name}: an adapter of rank {lora.rank}, {moved}",
            f"{count_text(recipe.trainers.count, 'trainer')} to {engines}; read in place on GPUs of one host",
            f"its model, {_parameters(_shape(recipe.model), tensors)}, comes from a checkpoint, once",
            "",
            "serves",
            *(f"  {line}" for line in _serves_lines(planned(recipe))),
        ]
    )


def _adapter_tensors(rank: int, tensors: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Return A [rank, columns] and B [rows, rank] of each linear layer."""
    return [
        TensorMeta(f"{meta.name}.{side}", "float32", shape)
        for meta in tensors
        if meta.name.endswith("_proj.weight")
        for side, shape in (("A", (rank, meta.shape[1])), ("B", (meta.shape[0], rank)))
    ]


def planned(recipe: Recipe) -> list[Covered]:
    """Return the coverage of a recipe's engines, before anything has moved.

    Raises ConfigError as `forecast`.
    """
    if lora := recipe.trainers.lora:
        tensors = checkpoint_tensors(_shape(recipe.model))
        pairs = _adapter_tensors(lora.rank, tensors)
        return [
            row
            for name in recipe.engine_specs
            for row in (
                Covered.of(name, "model", tensors, "it comes from a checkpoint", IDENTITY),
                Covered.of(name, "adapter policy", pairs, DIRECT, IDENTITY),
            )
        ]
    scene = recipe_scene(recipe, None, offloaded=False)
    _explain(scene)  # refuses limits that are too small
    return _served(scene)


def _serves_lines(rows: Sequence[Covered]) -> list[str]:
    return [
        *coverage_table(rows, planned=True).splitlines(),
        "routes are those of engines on GPUs; on CPUs all is broadcast",
    ]


def _shape(spec: ModelSpec, draft_layers: int = 0) -> ModelShape:
    sizes = asdict(spec) | {"moe": _mixture(spec.moe)}
    del sizes["pretrain_steps"]
    return ModelShape(**sizes, qk_norm=True, dtype="float32", draft_layers=draft_layers)


def _trainers(spec: TrainerSpec, *, is_mixture: bool) -> TrainerParallel:
    kinds: dict[str, TrainerParallel] = {
        "fsdp2": Fsdp(spec.count),
        "deepspeed": Zero(spec.count),
        "megatron": MegatronOrder(dp=spec.count, ep=spec.count)
        if is_mixture
        else MegatronOrder(tp=spec.count),
        "plain": Fsdp(shards=1, replicas=spec.count),
    }
    return kinds[spec.kind]


def _mixture(spec: MoeSpec | None) -> MixtureShape | None:
    if spec is None:
        return None
    return MixtureShape(num_experts=spec.num_experts, intermediate_size=spec.intermediate_size)


def forecast(scene: Scene) -> str:
    """Describe the scene, then each way of moving the weights.

    Raises:
        ConfigError: the model cannot be cut as the scene asks, or the limits of `sync` are too small.
    """
    num_gpus = count_text(scene.members.num_holders, "GPU")
    lines = [
        f"{scene.name}: {_parameters(scene.model, scene.tensors)}",
        f"{_ranks(scene)}, on {num_gpus}{_on_hosts(scene)}",
    ]
    sections = {
        "serves": _serves_lines(_served(scene)),
        "broadcast": _broadcast(scene),
        "direct": _direct(scene),
    }
    if scene.link:
        ranks = scene.engines[0].parallel.num_ranks
        sections["deltas"] = explain_deltas(scene.tensors, scene.trainers.num_ranks, ranks, scene.link)
    in_parts = not (scene.offloaded or scene.why_whole)
    for quantization in dict.fromkeys(engine.quantization for engine in scene.engines):
        if quantization:
            held = _held(scene.tensors, quantization)
            sections["quantised"] = explain_formats(held, quantization, in_parts=in_parts)
    for title, section in sections.items():
        lines += ["", title, *(f"  {line}" for line in section)]
    return "\n".join(lines)


def _held(tensors: Sequence[TensorMeta], quantization: Quantization | None) -> list[TensorMeta]:
    """Return the tensors as an engine takes them: one that quantises is in bfloat16."""
    wide = ("float32",) if quantization else ()
    return [replace(meta, dtype="bfloat16") if meta.dtype in wide else meta for meta in tensors]


def _served(scene: Scene) -> list[Covered]:
    """Return the coverage of each engine."""
    layouts, source = scene.layouts, scene.source.stated
    travelling = match(source, sorted(layouts.items())).tensors
    parts = {
        name: [meta for meta in travelling if meta.name.startswith(DRAFT) is is_draft]
        for name, is_draft in (("model", False), ("draft", True))
    }
    known: dict[tuple[Layout, Quantization | None], list[_Row]] = {}
    rows: list[Covered] = []
    for engine in scene.engines:
        key = layout, quantization = layouts[engine.name], engine.quantization
        if key not in known:
            converts = formats_text(scene.tensors, quantization) if quantization else ""
            same, _ = same_dtype_tensors(source, engine.name, layout)
            is_whole = converts and scene.why_whole
            whole = is_whole or scene.offloaded or casts(dtypes(travelling), layout.tensors)
            route = DIRECT if same and not whole and scene.sync.mode != "broadcast" else "broadcast"
            known[key] = [
                (part, metas, route, conversion_of(source, metas, layout, converts))
                for part, metas in parts.items()
                if metas or part == "model"
            ]
        rows += [Covered.of(engine.name, *row) for row in known[key]]
    return rows


def _explain(scene: Scene) -> Explanation:
    sync, cluster = scene.sync, None
    if scene.cluster:
        name, host = scene.cluster
        cluster = Cluster(name, host.nvlink.gb_per_s, host.host.gb_per_s if scene.offloaded else None)
    return explain_broadcast(
        scene.source,
        scene.layouts,
        scene.members,
        cluster,
        bucket_bytes=sync.bucket_bytes,
        max_staging_bytes=sync.max_staging_bytes,
        slots=sync.num_slots,
    )


def _broadcast(scene: Scene) -> list[str]:
    shown = _explain(scene)
    return [*str(shown).splitlines(), *(_between_hosts(shown, scene.cluster[1]) if scene.cluster else ())]


def _direct(scene: Scene) -> list[str]:
    if scene.offloaded:
        return ["none: the trainers publish into host memory, which engines do not read"]
    if reason := scene.why_whole:
        return [f"none: a quantised engine takes whole tensors, since {reason}"]
    name, engine = next(iter(scene.layouts.items()))
    names, reasons = same_dtype_tensors(scene.source.stated, name, engine)
    lines = [f"{tensor}, by broadcast: {reason}" for tensor, reason in list(reasons.items())[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"and {count_text(len(reasons) - _MOST_REASONS, 'more tensor')} by broadcast")
    if not names:
        return lines
    floor = reads_floor(scene.source, scene.layouts, scene.members, names, scene.cluster)
    lines = [*str(floor).splitlines(), *lines]
    if any(engine.quantization for engine in scene.engines):
        lines.append(
            "quantised engines read directly from the second update on: the first one shows where bytes go"
        )
    return lines


def _parameters(model: ModelShape, tensors: Sequence[TensorMeta]) -> str:
    numel = sum(meta.numel for meta in tensors)
    count = f"{numel / 1e9:.2f} billion" if numel >= 1e9 else f"{numel / 1e6:.2f} million"
    published = f", published {model.published_billions:g}" if model.published_billions else ""
    draft = ", with those of its draft" if model.draft else ""
    return f"{count_text(len(tensors), 'tensor')} of {model.dtype}, {count} parameters{published}{draft}"


def _ranks(scene: Scene) -> str:
    trainers = count_text(scene.trainers.num_ranks, "trainer rank")
    *some, last = dict.fromkeys(engine.parallel.num_ranks for engine in scene.engines)
    kinds = " and ".join([*map(str, some), count_text(last, "rank")])
    return f"{trainers}, {count_text(len(scene.engines), 'engine')} of {kinds}"


def _on_hosts(scene: Scene) -> str:
    if scene.cluster is None:
        return ""
    name, host = scene.cluster
    rates = ", ".join(
        f"{what} {rate.gb_per_s:g} GB/s ({rate.source})"
        for what, rate in (("NVLink", host.nvlink), ("host", host.host), ("NIC", host.nic))
    )
    num_hosts = host.num_hosts(scene.members.num_holders)
    return f" in {count_text(num_hosts, 'host')}\n{name}, per GPU: {host.gpu}, {rates}"


def _between_hosts(shown: Explanation, host: HostSpec) -> list[str]:
    """Return the floor between hosts, which receive each missing byte at least once."""
    num_hosts = host.num_hosts(max(*shown.sent, *shown.received) + 1)
    if num_hosts == 1:
        return []
    sent, total = [0] * num_hosts, sum(shown.sent.values())
    for holder, nbytes in shown.sent.items():
        sent[holder // host.gpus_per_host] += nbytes
    takers = {holder // host.gpus_per_host for holder in shown.received}
    into = max(total - sent[taker] for taker in takers)
    out = max(sent[giver] for giver in range(num_hosts) if len(takers) > 1 or giver not in takers)
    seconds = max(into, out) / (host.gpus_per_host * host.nic.gb_per_s * 1e9)
    return [
        f"between {num_hosts} hosts: floor {time_text(seconds)}; {size_text(into)} into one of them, "
        f"{size_text(out)} out of one, through {count_text(host.gpus_per_host, 'NIC')}"
    ]
