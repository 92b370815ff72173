"""Forecasts what an update would move and how fast it could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.plan import (
    Cluster,
    Explanation,
    Layout,
    Members,
    TensorMeta,
    same_dtype_tensors,
)
from weightsync.plan.figures.broadcast_figures import explain_broadcast
from weightsync.plan.layout.conversion import IDENTITY, casts, conversion_of, dtypes
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.formats import Quantization
from weightsync.plan.layout.match import match
from weightsync.recipes.config.recipe import ModelSpec, MoeSpec, Recipe, TrainerSpec
from weightsync.recipes.forecast.engine_reads import reads_floor
from weightsync.recipes.forecast.grids import TrainersGrid, engine_layout
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.forecast.parallel import EngineParallel, Fsdp, Megatron, TrainerParallel, Zero
from weightsync.recipes.forecast.quantised import INT4, explain_formats, formats_text, why_whole
from weightsync.recipes.forecast.shapes import MixtureShape, ModelShape, checkpoint_tensors
from weightsync.report import DIRECT, Covered, coverage_table
from weightsync.text import count_text, size_text, time_text

_MOST_REASONS = 3

_Row = tuple[str, Sequence[TensorMeta], str, str]
"""A component, its tensors, their route and their conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The trainers, engines and hosts of a forecast.

    Attributes:
        engines: one entry per engine.
        apart: engines have their own GPUs, after the trainers'; else both share GPUs, from the first on.
        offloaded: trainers publish into host memory.
        cluster: its name and its hosts, which are filled in order; None gives no times.
        names: of the engines; empty for engine-0, engine-1 and so on.
        tensors: of the model, in its checkpoint; empty for those that its form tells.
        quantizations: how the checkpoint of each engine is quantised, None if it is not; empty if none is.
    """

    name: str
    model: ModelShape
    trainers: TrainerParallel
    engines: tuple[EngineParallel, ...] = (EngineParallel(),)
    apart: bool = False
    offloaded: bool = False
    cluster: tuple[str, HostSpec] | None = None
    sync: SyncConfig = field(default_factory=SyncConfig)
    names: tuple[str, ...] = ()
    quantizations: tuple[Quantization | None, ...] = ()
    tensors: tuple[TensorMeta, ...] = ()

    def members(self) -> Members:
        """Return the members, with one holder for each GPU."""
        num_trainers = self.trainers.num_ranks
        start, engines = num_trainers if self.apart else 0, []
        names = self.names or [f"engine-{number}" for number in range(len(self.engines))]
        for name, engine in zip(names, self.engines, strict=True):
            engines.append((name, tuple(range(start, start + engine.num_ranks))))
            start += engine.num_ranks
        return Members(max(num_trainers, start), tuple(range(num_trainers)), tuple(engines))


@dataclass(frozen=True, eq=False)
class _Sides:
    """The layouts of a scene, from which each way of moving is planned."""

    scene: Scene
    tensors: Sequence[TensorMeta]
    members: Members
    source: TrainersGrid
    engines: Mapping[str, Layout]
    quantizations: Sequence[Quantization | None]

    @cached_property
    def why_whole(self) -> str:
        """Why quantised engines do not read just what their ranks keep; "" if they do, or none is.

        One engine that takes whole tensors speaks for all.
        """
        scene, members = self.scene, self.members
        quantised = [
            (engine, gpus, quantization)
            for engine, (_, gpus), quantization in zip(
                self.engines.values(), members.engines, self.quantizations, strict=True
            )
            if quantization
        ]
        if not quantised:
            return ""
        if scene.sync.mode != "auto":
            return f"sync.mode is {scene.sync.mode}"
        if members.num_holders == 1:
            return "its holder has the trainer's memory on its own GPU"
        if casts(dtypes(self.tensors), quantised[0][0].tensors):
            return "they are cast"
        per_host = scene.cluster[1].gpus_per_host if scene.cluster else members.num_holders
        gpus_used = {*members.trainers, *(gpu for _, gpus, _ in quantised for gpu in gpus)}
        if len({gpu // per_host for gpu in gpus_used}) > 1:
            return "some trainers are on other hosts"
        kinds = dict.fromkeys((engine, quantization) for engine, _, quantization in quantised)
        return next(filter(None, (why_whole(*kind) for kind in kinds)), "")


def recipe_scene(recipe: Recipe, cluster: tuple[str, HostSpec] | None, *, offloaded: bool) -> Scene:
    """Return the scene that `recipe` would run."""
    spec = recipe.model
    if recipe.trainers.lora:
        raise ConfigError("--cluster", cluster and cluster[0], "leave it out: it is for models")
    return Scene(
        name=recipe.name,
        model=_shape(spec, recipe.draft.num_hidden_layers if recipe.draft else 0),
        trainers=_trainers(recipe.trainers, is_mixture=recipe.model.moe is not None),
        engines=tuple(EngineParallel(tp=spec.tensor_parallel_size) for spec in recipe.engine_specs.values()),
        apart=recipe.placement == "disaggregated",
        offloaded=offloaded or recipe.loop.sleep > 0,
        cluster=cluster,
        sync=recipe.sync,
        names=tuple(recipe.engine_specs),
        quantizations=tuple(
            Quantization.read(INT4) if spec.quantization == "int4" else None
            for spec in recipe.engine_specs.values()
        ),
    )


def forecast_adapter(recipe: Recipe) -> str:
    """Describe what an update of the recipe's adapter moves."""
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
    """Return the rows of what a recipe's engines are to serve, before anything has moved.

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
    sides = _sides(recipe_scene(recipe, None, offloaded=False))
    _explain(sides)  # refuses limits that are too small
    return _served(sides)


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
        "megatron": Megatron(dp=spec.count, ep=spec.count) if is_mixture else Megatron(tp=spec.count),
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
    sides = _sides(scene)
    tensors, members = sides.tensors, sides.members
    lines = [
        f"{scene.name}: {_parameters(scene.model, tensors)}",
        f"{_ranks(scene)}, on {count_text(members.num_holders, 'GPU')}{_on_hosts(scene, members)}",
    ]
    sections = {
        "serves": _serves_lines(_served(sides)),
        "broadcast": _broadcast(sides),
        "direct": _direct(sides),
    }
    in_parts = not (scene.offloaded or sides.why_whole)
    for quantization in dict.fromkeys(filter(None, sides.quantizations)):
        held = _held(tensors, quantization)
        sections["quantised"] = explain_formats(held, quantization, in_parts=in_parts)
    for title, section in sections.items():
        lines += ["", title, *(f"  {line}" for line in section)]
    return "\n".join(lines)


def _held(tensors: Sequence[TensorMeta], quantization: Quantization | None) -> list[TensorMeta]:
    """Return the tensors as an engine takes them: one that quantises is in bfloat16."""
    wide = ("float32",) if quantization else ()
    return [replace(meta, dtype="bfloat16") if meta.dtype in wide else meta for meta in tensors]


def _sides(scene: Scene) -> _Sides:
    tensors, members = scene.tensors or checkpoint_tensors(scene.model), scene.members()
    quantizations = scene.quantizations or (None,) * len(scene.engines)
    kinds = [*zip(scene.engines, quantizations, strict=True)]
    layouts = {kind: engine_layout(_held(tensors, kind[1]), scene.model, kind[0]) for kind in set(kinds)}
    return _Sides(
        scene,
        tensors,
        members,
        TrainersGrid(tensors, scene.model, scene.trainers),
        {name: layouts[kind] for (name, _), kind in zip(members.engines, kinds, strict=True)},
        quantizations,
    )


def _served(sides: _Sides) -> list[Covered]:
    """Return the rows of what each engine is to serve."""
    scene, known = sides.scene, dict[tuple[Layout, Quantization | None], list[_Row]]()
    source = sides.source.stated
    travelling = match(source, sorted(sides.engines.items())).tensors
    of_model, of_draft = (
        [meta for meta in travelling if meta.name.startswith(DRAFT) is drafts] for drafts in (False, True)
    )
    parts = {"model": of_model} | ({"draft": of_draft} if of_draft else {})
    for (name, engine), quantization in zip(sides.engines.items(), sides.quantizations, strict=True):
        if (engine, quantization) not in known:
            converts = formats_text(sides.tensors, quantization) if quantization else ""
            same, _ = same_dtype_tensors(source, name, engine)
            is_whole = converts and sides.why_whole
            whole = is_whole or scene.offloaded or casts(dtypes(travelling), engine.tensors)
            is_direct = same and not whole and scene.sync.mode != "broadcast"
            route = DIRECT if is_direct else "broadcast"
            known[engine, quantization] = [
                (part, metas, route, conversion_of(source, metas, engine, converts))
                for part, metas in parts.items()
            ]
    return [
        Covered.of(name, *row)
        for (name, engine), quantization in zip(sides.engines.items(), sides.quantizations, strict=True)
        for row in known[engine, quantization]
    ]


def _explain(sides: _Sides) -> Explanation:
    scene, sync, cluster = sides.scene, sides.scene.sync, None
    if scene.cluster:
        name, host = scene.cluster
        cluster = Cluster(name, host.nvlink.gb_per_s, host.host.gb_per_s if scene.offloaded else None)
    return explain_broadcast(
        sides.source,
        sides.engines,
        sides.members,
        cluster,
        bucket_bytes=sync.bucket_bytes,
        max_staging_bytes=sync.max_staging_bytes,
        slots=sync.num_slots,
    )


def _broadcast(sides: _Sides) -> list[str]:
    shown, cluster = _explain(sides), sides.scene.cluster
    return [*str(shown).splitlines(), *(_between_hosts(shown, cluster[1]) if cluster else ())]


def _direct(sides: _Sides) -> list[str]:
    scene = sides.scene
    if scene.offloaded:
        return ["none: the trainers publish into host memory, which engines do not read"]
    if reason := sides.why_whole:
        return [f"none: a quantised engine takes whole tensors, since {reason}"]
    name, engine = next(iter(sides.engines.items()))
    names, reasons = same_dtype_tensors(sides.source.stated, name, engine)
    lines = [f"{tensor}, by broadcast: {reason}" for tensor, reason in list(reasons.items())[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"and {count_text(len(reasons) - _MOST_REASONS, 'more tensor')} by broadcast")
    if not names:
        return lines
    floor = reads_floor(sides.source, sides.engines, sides.members, names, scene.cluster)
    lines = [*str(floor).splitlines(), *lines]
    if any(scene.quantizations):
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
    *some, last = dict.fromkeys(engine.num_ranks for engine in scene.engines)
    kinds = " and ".join([*map(str, some), count_text(last, "rank")])
    return f"{trainers}, {count_text(len(scene.engines), 'engine')} of {kinds}"


def _on_hosts(scene: Scene, members: Members) -> str:
    if scene.cluster is None:
        return ""
    name, host = scene.cluster
    rates = ", ".join(
        f"{what} {rate.gb_per_s:g} GB/s ({rate.source})"
        for what, rate in (("NVLink", host.nvlink), ("host", host.host), ("NIC", host.nic))
    )
    num_hosts = host.num_hosts(members.num_holders)
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
