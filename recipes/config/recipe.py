"""The recipe: frozen dataclasses, filled strictly from YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml

from weightsync.config import Limit, Positive, SyncConfig, at_least, check_fields, load_dataclass
from weightsync.errors import ConfigError, nearest
from weightsync.recipes.config.events import EventSpec, check_events
from weightsync.recipes.config.yaml_lines import located, read_yaml
from weightsync.text import count_text

_HeadDim = Annotated[int, Limit((32, 64, 128).__contains__, "give 32, 64 or 128, which every engine takes")]
_VocabSize = Annotated[int, Limit(lambda size: size >= 64 and size % 64 == 0, "give a multiple of 64")]
_Seed = Annotated[int, Limit(range(1 << 63).__contains__, "give at least 0 and less than 2**63")]
_Pairs = Annotated[int, Limit(range(1, 17).__contains__, "give 1 to 16")]
_Count = Annotated[int, Limit(range(1, 100_001).__contains__, "give at least 1, at most 100000")]
_GroupSize = Annotated[int, at_least(2)]
_Rate = Annotated[float, Limit(lambda value: 0 < value < math.inf, "give a finite number above 0")]
_Wrong = Iterator[tuple[str, object, str]]
_Fraction = Annotated[float, Limit(lambda value: 0 <= value <= 1, "give a number from 0 to 1")]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The experts of a mixture; they replace the dense MLP of every layer.

    Attributes:
        num_experts: number of experts in each layer.
        num_experts_per_tok: experts that each token is sent to, at most `num_experts`.
        intermediate_size: size of one expert's MLP; a multiple of the ranks of every engine.
    """

    num_experts: _Count
    num_experts_per_tok: Positive
    intermediate_size: Positive

    def __post_init__(self) -> None:
        check_fields(self, field="model.moe")
        if self.num_experts_per_tok > self.num_experts:
            remedy = f"give at most model.moe.num_experts, {self.num_experts}"
            raise ConfigError("model.moe.num_experts_per_tok", self.num_experts_per_tok, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of a Qwen3 to build with random weights, or with `moe` of a Qwen3-MoE.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: size of each MLP; a multiple of the ranks of every engine.
        num_hidden_layers: number of layers.
        num_attention_heads: query heads; a multiple of `num_key_value_heads` and of the ranks of every
            engine.
        num_key_value_heads: key and value heads, which groups of query heads share.
        head_dim: size of each head: 32, 64 or 128.
        vocab_size: number of tokens; a multiple of 64.
        tie_word_embeddings: use the embedding as the output head.
        pretrain_steps: supervised steps before the run, in which the model learns to name the smaller digit.
            0 leaves its weights random. Adapters need a model that knows digits.
        moe: experts in place of the MLPs. Without it the model is dense.
    """

    hidden_size: Positive = 128
    intermediate_size: Positive = 256
    num_hidden_layers: _Count = 2
    num_attention_heads: int = 4
    num_key_value_heads: Positive = 2
    head_dim: _HeadDim = 32
    vocab_size: _VocabSize = 64
    tie_word_embeddings: bool = False
    pretrain_steps: Annotated[int, at_least(0)] = 0
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        check_fields(self, field="model")
        if self.num_attention_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            remedy = f"give a multiple of model.num_key_value_heads, {self.num_key_value_heads}"
            raise ConfigError("model.num_attention_heads", self.num_attention_heads, remedy)

    def check_cut(self, ranks: int, field: str) -> None:
        """Raise ConfigError if the model cannot be cut over `ranks`, the value of `field`."""
        mlp = self.moe.intermediate_size if self.moe else self.intermediate_size
        cut = {"num_attention_heads": self.num_attention_heads, "vocab_size": self.vocab_size}
        for name, size in (cut | {"moe.intermediate_size" if self.moe else "intermediate_size": mlp}).items():
            if size % ranks:
                raise ConfigError(field, ranks, f"give a divisor of model.{name}, {size}")
        if self.num_key_value_heads % ranks and ranks % self.num_key_value_heads:
            remedy = f"give a divisor or a multiple of model.num_key_value_heads, {self.num_key_value_heads}"
            raise ConfigError(field, ranks, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """A draft with which vLLM speculates: a model like `model` with another number of layers.

    Trainers teach the draft to predict the model's tokens, and an update moves both, in one commit. The draft
    starts with random weights.

    Attributes:
        num_hidden_layers: number of layers.
        num_speculative_tokens: tokens that the draft proposes before the model checks them.
    """

    num_hidden_layers: _Count = 1
    num_speculative_tokens: Positive = 2

    def __post_init__(self) -> None:
        check_fields(self, field="draft")

    def form(self, model: ModelSpec) -> ModelSpec:
        """Return the form of the draft of `model`."""
        return replace(model, num_hidden_layers=self.num_hidden_layers, pretrain_steps=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """A LoRA adapter of all linear layers, made by PEFT.

    Attributes:
        rank: 8, 16, 32, 64 or 128, which vLLM's slots have.
        alpha: outputs are multiplied with alpha / rank.
    """

    rank: Annotated[int, Limit((8, 16, 32, 64, 128).__contains__, "give 8, 16, 32, 64 or 128")] = 8
    alpha: Positive = 16

    def __post_init__(self) -> None:
        check_fields(self, field="trainers.lora")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The trainer's shards.

    Attributes:
        kind: the training library. ``fsdp2`` shards each tensor by rows, ``deepspeed`` gives each rank
            a run of each tensor's elements (ZeRO-3), ``megatron`` cuts a dense model by tensor parallelism
            and a mixture by experts, ``plain`` has the whole model on each rank (DDP).
        count: number of ranks. Each rank is an actor.
        quantize: trainers quantise linear layers, in place of engines, so that fewer bytes travel.
        lora: an adapter that is trained and updated in place of the model.
    """

    kind: Literal["fsdp2", "deepspeed", "megatron", "plain"] = "fsdp2"
    count: _Count = 2
    quantize: bool = False
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        check_fields(self, field="trainers")

    def check(self, model: ModelSpec) -> None:
        """Raise ConfigError if `model` cannot be cut over these ranks."""
        if self.kind != "megatron":
            return
        if model.moe is None:
            model.check_cut(self.count, "trainers.count")
        elif model.moe.num_experts % self.count:
            remedy = f"give a divisor of model.moe.num_experts, {model.moe.num_experts}"
            raise ConfigError("trainers.count", self.count, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """A named group of equal engines. Group ``main`` has engines ``main-0``, ``main-1``, and so on.

    Attributes:
        kind: ``auto`` chooses vLLM if installed, else torch (transformers).
        count: number of engines.
        tensor_parallel_size: ranks of each engine, over which the model is cut; torch has one.
        quantization: with ``int4``, vLLM stores linear layers in four bits, in groups of 32, and the rest in
            bfloat16. Groups may differ: an engine casts tensors that travel in another dtype.
        deployment: engines of all groups that name the same deployment serve one version together, or none,
            such as prefill engines and decode engines. Empty for engines that serve by themselves.
    """

    kind: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    count: _Count = 1
    tensor_parallel_size: _Count = 1
    quantization: Literal["none", "int4"] = "none"
    deployment: str = ""

    def check(self, group: str, model: ModelSpec) -> None:
        """Raise ConfigError for settings that no engine can have, with `model` cut over the ranks."""
        check_fields(self, field=f"engines.{group}")
        ranks, field = self.tensor_parallel_size, f"engines.{group}.tensor_parallel_size"
        if ranks > 1 and self.kind == "torch":
            raise ConfigError(field, ranks, "give 1, or kind: vllm; a torch engine has one rank")
        if self.quantization != "none" and self.kind in ("sglang", "torch"):
            field = f"engines.{group}.quantization"
            raise ConfigError(
                field, self.quantization, f"give none, or kind: vllm; {self.kind} has none here"
            )
        model.check_cut(ranks, field)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSpec:
    """The training loop.

    Attributes:
        kind: ``grpo``, or ``elastic`` for the same loop with `events`.
        steps: rollouts, each followed by training and by an update of the engines.
        seed: seed of the model's first weights and of the problems.
        prompts_per_step: problems per step, split among the trainers.
        num_pairs: pairs of digits in each problem, and tokens of the answer.
        group_size: completions sampled for each problem.
        epochs: optimiser steps on each step's rollouts.
        learning_rate: learning rate of AdamW at the first step. It falls to 0 linearly.
        clip: see :func:`weightsync.recipes.training.grpo.policy_loss`.
        temperature: sampling temperature. The loss uses log-probabilities before temperature.
        target_reward: the run fails if the mean of the last five rewards is lower.
        sleep: trainers and engines share GPUs in turns. Engines sleep at this level while trainers train: 1
            moves the engines' weights to the host, 2 drops them. Trainers are offloaded at other times. With
            0 both stay on the GPUs. On CPUs, only torch engines can sleep.
    """

    kind: Literal["grpo", "elastic"] = "grpo"
    steps: Positive = 25
    seed: _Seed = 0
    prompts_per_step: Positive = 128
    num_pairs: _Pairs = 1
    group_size: _GroupSize = 16
    epochs: Positive = 4
    learning_rate: _Rate = 2e-3
    clip: _Rate = 0.2
    temperature: _Rate = 1.0
    target_reward: _Fraction = 0.0
    sleep: Literal[0, 1, 2] = 0

    def __post_init__(self) -> None:
        check_fields(self, field="loop")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A run.

    Attributes:
        name: name of the run, and of the folder under ``runs/``.
        engines: groups of engines by name.
        draft: a draft with which engines speculate. Needs ``sync.components: {draft: trained}``.
        placement: ranks on one GPU, or without enough GPUs on one slot in host memory. ``colocated`` puts
            trainer ranks and engine ranks on the same devices, from the first on. ``disaggregated`` puts
            engines on devices after the trainers'. Slots go round the hosts, from the driver's host on.
        events: engines that join, leave or die during the loop ``elastic``.
        resume: take over the actors of an earlier run of the same name whose driver died.
    """

    name: str
    engines: Mapping[str, EngineSpec]
    model: ModelSpec = field(default_factory=ModelSpec)
    trainers: TrainerSpec = field(default_factory=TrainerSpec)
    draft: DraftSpec | None = None
    placement: Literal["colocated", "disaggregated"] = "colocated"
    sync: SyncConfig = field(default_factory=SyncConfig)
    loop: LoopSpec = field(default_factory=LoopSpec)
    events: tuple[EventSpec, ...] = ()
    resume: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        if not self.engines:
            raise ConfigError("engines", {}, "give at least one group, such as main: {kind: auto, count: 2}")
        self.trainers.check(self.model)
        for group, spec in self.engines.items():
            _check_name(group, f"engines.{group}")
            spec.check(group, self.model)
        for wrong in self._contradictions():
            raise ConfigError(*wrong)
        check_events(self.engine_specs, self.events, self.loop.steps)
        for index, event in enumerate(self.events):
            if event.action == "add" and (deployment := self.engine_specs[event.engine].deployment):
                remedy = f"it is in deployment {deployment}, which nobody joins: give an engine in none"
                raise ConfigError(f"events[{index}].engine", event.engine, remedy)

    def _contradictions(self) -> _Wrong:
        """Yield field, value and remedy of each setting that does not fit the other settings."""
        yield from self._deployments_wrong()
        if self.trainers.quantize:
            if any(spec.quantization == "none" for spec in self.engines.values()):
                yield "trainers.quantize", True, "give all engines a quantization"
            if self.trainers.kind not in ("fsdp2", "plain"):
                remedy = f"give trainers.kind fsdp2 or plain; {self.trainers.kind} cannot"
                yield "trainers.quantize", True, remedy
            if self.loop.sleep:
                yield "trainers.quantize", True, "give loop.sleep 0; trainers that offload cannot"
        if self.trainers.lora:
            yield from self._not_plain("trainers.lora")
        yield from self._draft_wrong()
        num_prompts, num_engines = self.loop.prompts_per_step, len(self.engine_specs)
        if num_prompts % self.trainers.count:
            yield (
                "loop.prompts_per_step",
                num_prompts,
                f"give a multiple of trainers.count, {self.trainers.count}",
            )
        if num_prompts < num_engines:
            yield "loop.prompts_per_step", num_prompts, f"give each of the {num_engines} engines at least one"
        if self.sync.min_engines > num_engines:
            remedy = f"the recipe has only {count_text(num_engines, 'engine')}"
            yield "sync.min_engines", self.sync.min_engines, remedy
        is_elastic = self.loop.kind == "elastic"
        if self.events and not is_elastic:
            yield "events", len(self.events), "leave them out, or give loop.kind elastic"
        if self.resume and is_elastic:
            yield "resume", True, "leave it out; loop.kind elastic starts from the beginning"
        if self.loop.sleep and (is_elastic or self.placement != "colocated"):
            remedy = (
                "give 0, or placement colocated and loop.kind grpo, where engines share the trainers' GPUs"
            )
            yield "loop.sleep", self.loop.sleep, remedy

    def _deployments_wrong(self) -> _Wrong:
        for group, spec in self.engines.items():
            name, field = spec.deployment, f"engines.{group}.deployment"
            if not name:
                continue
            _check_name(name, field)
            if len(self.deployments[name]) == 1:
                others = {other.deployment for other in self.engines.values()} - {"", name}
                remedy = nearest(name, others) if others else "give it to another group as well"
                yield field, name, f"{group}-0 would be alone in it; {remedy}"
            if self.trainers.lora:
                yield field, name, "leave it out; each engine takes an adapter by itself"

    def _draft_wrong(self) -> _Wrong:
        treatment = self.sync.components.get("draft")
        if self.draft:
            if treatment != "trained":
                remedy = "give {draft: trained}: an update brings the draft with the model"
                yield "sync.components", dict(self.sync.components), remedy
            if self.trainers.lora:
                yield "draft", asdict(self.draft), "leave it out, or leave trainers.lora out"
            yield from self._not_plain("draft")
        elif treatment == "trained":
            remedy = "leave it out, or give a draft, such as draft: {num_hidden_layers: 1}"
            yield "sync.components.draft", treatment, remedy

    def _not_plain(self, what: str) -> _Wrong:
        """Yield settings with which neither adapters nor drafts work. `what`: the key."""
        wanted: list[tuple[str, object, tuple[object, ...]]] = [
            ("trainers.kind", self.trainers.kind, ("fsdp2", "plain")),
            ("trainers.quantize", self.trainers.quantize, (False,)),
            ("model.moe", self.model.moe, (None,)),
            ("loop.sleep", self.loop.sleep, (0,)),
            ("resume", self.resume, (False,)),
        ]
        for group, spec in self.engines.items():
            wanted.append((f"engines.{group}.kind", spec.kind, ("vllm", "auto")))
            wanted.append((f"engines.{group}.quantization", spec.quantization, ("none",)))
        for name, value, valid in wanted:
            if value not in valid:
                yield name, value, f"give {' or '.join(map(str, valid))}, or leave {what} out"

    @property
    def engine_specs(self) -> dict[str, EngineSpec]:
        """Engine names ``main-0``, ``main-1``, … with the group of each."""
        return {f"{group}-{i}": spec for group, spec in self.engines.items() for i in range(spec.count)}

    @property
    def deployments(self) -> dict[str, tuple[str, ...]]:
        """The engines of each deployment."""
        named: dict[str, tuple[str, ...]] = {}
        for name, spec in self.engine_specs.items():
            if spec.deployment:
                named[spec.deployment] = (*named.get(spec.deployment, ()), name)
        return named

    @property
    def devices(self) -> dict[str, tuple[int, ...]]:
        """GPU or slot numbers of ``trainer 0``, ``engine main-0`` and so on, one per rank."""
        placed: dict[str, tuple[int, ...]] = {
            f"trainer {rank}": (rank,) for rank in range(self.trainers.count)
        }
        first = self.trainers.count if self.placement == "disaggregated" else 0
        for name, spec in self.engine_specs.items():
            placed[f"engine {name}"] = tuple(range(first, first + spec.tensor_parallel_size))
            first += spec.tensor_parallel_size
        return placed

    @property
    def num_devices(self) -> int:
        """Number of GPUs or slots that the recipe needs."""
        return 1 + max(device for ranks in self.devices.values() for device in ranks)

    @property
    def slots(self) -> dict[int, str]:
        """Slot names of devices without a GPU, as in `EngineActor`."""
        names = {device: str(device) for device in range(self.num_devices)}
        for process, (first, *others) in self.devices.items():
            if process.startswith("engine "):
                names |= {device: f"{first}.{rank}" for rank, device in enumerate(others, start=1)}
        return names

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all processes of the run, as in a fault plan."""
        return (*self.devices, *(f"holder {i}" for i in range(self.num_devices)))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe at `path`, with overrides such as ``engines.main.count=4``.

    The value of an override is YAML. The path must exist in the complete recipe.

    Raises:
        ConfigError: names the file and line or the override, the field, the value and a remedy.
    """
    data, places = read_yaml(path, "recipe")
    with located(places, f"{path}:1"):
        recipe = load_dataclass(Recipe, data, field="")
    if not overrides:
        return recipe
    complete, given = asdict(recipe), {}
    for override in overrides:
        given[_override(complete, override)] = f"--set {override}"
    with located(given, " ".join(given.values())):  # the file is valid without overrides
        return load_dataclass(Recipe, complete, field="")


def _override(data: dict[str, object], override: str) -> str:
    """Apply one override to `data`. Returns the path of the value."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError("--set", override, "give key=value, such as loop.steps=10")
    *parents, leaf = path.split(".")
    here: object = data
    for part in parents:
        here = _child(here, part, path)
    _child(here, leaf, path)
    assert isinstance(here, dict)
    try:
        here[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(path, text, f"give a YAML value; {' '.join(str(error).split())}") from error
    return path


def _child(parent: object, name: str, path: str) -> object:
    known = parent if isinstance(parent, dict) else {}
    if name not in known:
        raise ConfigError("--set", path, f"{name!r} is unknown; {nearest(name, known)}")
    return known[name]


def _check_name(name: str, field: str) -> None:
    if not re.fullmatch(r"[\w-][\w .-]{0,99}", name):
        raise ConfigError(field, name, "give a short text that can name a folder: letters, digits, - and _")
