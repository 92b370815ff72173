"""Starts a recipe's actors, on GPUs if there are enough, else on CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from weightsync.actors.engine import EngineActor
from weightsync.actors.holders.detached import actor_name
from weightsync.actors.ray.actor_class import actor_class
from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, DeadlineError
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.calls import collect
from weightsync.recipes.fleet.survival import actor_options
from weightsync.recipes.forecast.quantised import INT4
from weightsync.recipes.training.trainer import GrpoTrainer
from weightsync.text import count_text

_SHARE = 0.4
"""Fraction of a GPU for a trainer and for an engine. A holder reserves none."""

_ON_GPU: dict[str, dict[str, Any]] = {
    "torch": {"device": "cuda"},
    "sglang": {"mem_fraction_static": 0.3},
    "vllm": {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True},
}


_SLEEPS: dict[str, tuple[str, ...]] = {
    "torch": ("enable_sleep_mode",),
    "vllm": ("enable_sleep_mode",),
    "sglang": ("enable_memory_saver", "enable_weights_cpu_backup"),
}

_KIND = "accelerator_type:"
"""Prefix of the resource with which Ray names the type of GPUs."""


class Launcher:
    """Starts trainers and engines of `recipe`, which load the checkpoint at `model`, and a draft beside it.

    A placement group reserves one bundle for each of the recipe's devices, until `close`.

    Raises:
        DeadlineError: the cluster's GPUs are not free within ``sync.connect_timeout_s``.
        ConfigError: engines need GPUs to start or to sleep, and there are not enough.
    """

    def __init__(self, recipe: Recipe, model: Path) -> None:
        self._recipe, self.model = recipe, model
        self.draft = model.with_name("draft") if recipe.draft else None
        there = ray.cluster_resources()
        self._num_gpus = int(there.get("GPU", 0))
        self._kinds = sorted(key.removeprefix(_KIND) for key in there if key.startswith(_KIND))
        enough = self._num_gpus >= recipe.num_devices
        if not enough:
            self._refuse_engines_for_gpus()
        for name, spec in recipe.engine_specs.items():
            if recipe.loop.sleep and not enough and (kind := choose_engine(spec.kind)[0]) != "torch":
                remedy = f"engine {name} is {kind}, which sleeps on GPUs: give 0, or kind: torch"
                raise ConfigError("loop.sleep", recipe.loop.sleep, remedy)
        self._bundles = _reserve(recipe) if enough else None

    def __str__(self) -> str:
        needed = count_text(self._recipe.num_devices, "GPU")
        if self._bundles:
            return f"{needed} ({', '.join(self._kinds)})" if self._kinds else needed
        return f"CPUs ({needed} wanted, {self._num_gpus} there)" if self._num_gpus else "CPUs (no GPUs here)"

    @property
    def has_gpus(self) -> bool:
        """True if actors run on GPUs, and not on CPU slots."""
        return self._bundles is not None

    def _refuse_engines_for_gpus(self) -> None:
        """Raise ConfigError for vLLM or SGLang with a CUDA build of torch."""
        for group, spec in self._recipe.engines.items():
            kind, _ = choose_engine(spec.kind)
            if kind != "torch" and torch.version.cuda:
                needed = count_text(self._recipe.num_devices, "GPU")
                wanted = f"the recipe wants {needed}, the cluster has {self._num_gpus}"
                fewer = f"--set trainers.count=1 --set engines.{group}.count=1"
                remedy = f"{wanted}: give fewer ranks, such as {fewer}, or kind: torch"
                raise ConfigError(f"engines.{group}.kind", kind, remedy)

    def engine(self, name: str) -> ActorHandle[Any]:
        """Start or restart an engine, with dummy weights."""
        spec, process = self._recipe.engine_specs[name], f"engine {name}"
        options: dict[str, Any] = {"tensor_parallel_size": spec.tensor_parallel_size}
        kind = choose_engine(spec.kind)[0]
        if self._bundles:
            options |= _ON_GPU.get(kind, {})
        if lora := self._recipe.trainers.lora:
            options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": lora.rank}
        if draft := self._recipe.draft:
            speculative = {"num_speculative_tokens": draft.num_speculative_tokens, "model": str(self.draft)}
            options["speculative_config"] = {"method": "draft_model", **speculative}
        if spec.quantization == "int4":
            options |= {"dtype": "bfloat16", "hf_overrides": {"quantization_config": INT4}}
        if self._recipe.loop.sleep:
            options |= dict.fromkeys(_SLEEPS[kind], True)
        actor = actor_class(EngineActor).options(**self.options(process))
        engine: ActorHandle[Any] = actor.remote(
            spec.kind, str(self.model), name, options, self._slot(process)
        )
        return engine

    def trainers(self) -> dict[str, ActorHandle[Any]]:
        """Start all trainer ranks. Returns once the ranks have joined and loaded."""
        recipe, device = self._recipe, "cuda" if self._bundles else "cpu"
        timeout_s, trainers = recipe.sync.connect_timeout_s, {}
        for rank in range(recipe.trainers.count):
            process = f"trainer {rank}"
            actor = actor_class(GrpoTrainer).options(**self.options(process))
            model, slot, draft = str(self.model), self._slot(process), str(self.draft or "")
            trainers[process] = actor.remote(rank, recipe.trainers, model, recipe.loop, slot, device, draft)
        listens = {"trainer 0": trainers["trainer 0"].listen.remote(recipe.sync.ports)}
        (meeting,) = collect(listens, "listen", timeout_s).values()
        collect(
            {process: trainer.join.remote(*meeting) for process, trainer in trainers.items()},
            "join",
            timeout_s,
        )
        return trainers

    def close(self) -> None:
        """Release the GPUs, which ends the actors on them."""
        if self._bundles:
            remove_placement_group(self._bundles)

    def options(self, process: str) -> dict[str, Any]:
        """Return Ray's options for an actor.

        The actor sees the GPUs of all ranks. On CPUs, devices go round the hosts.
        """
        options, devices = actor_options(self._recipe, process), self._recipe.devices[process]
        if self._bundles is None:
            # A cluster with GPUs shows all of them to an actor that reserves none.
            hidden = {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}} if self._num_gpus else {}
            return options | hidden | _on_host(devices[0])
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._bundles, devices[0])
        if len(devices) == 1:
            return options | {"num_gpus": _SHARE}
        visible = ",".join(_visible_devices(self._bundles, devices))
        return options | {"num_gpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": visible}}}

    def _slot(self, process: str) -> str | None:
        return None if self._bundles else self._recipe.slots[self._recipe.devices[process][0]]


def _reserve(recipe: Recipe) -> PlacementGroup:
    """Reserve one GPU per device. If the run resumes, the reservation outlives its driver."""
    name, timeout_s = actor_name(recipe.name, "gpus"), recipe.sync.connect_timeout_s
    if recipe.resume:
        try:
            return get_placement_group(name)
        except ValueError:
            pass  # this is the first driver of the run
    lasting = {"name": name, "lifetime": "detached"} if recipe.resume else {}
    bundles = placement_group([{"GPU": 1}] * recipe.num_devices, strategy="PACK", **lasting)
    if not bundles.wait(timeout_s):
        remove_placement_group(bundles)
        raise DeadlineError("place", [count_text(recipe.num_devices, "GPU")], timeout_s)
    return bundles


def _on_host(device: int) -> dict[str, Any]:
    """Return Ray's option that places a device without a GPU. The driver's host is the first host.

    Ray chooses any host for an actor that reserves nothing, also with a soft affinity.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    order = sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    if len(order) == 1:
        return {}
    node = order[device % len(order)]["NodeID"]
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _visible_devices(bundles: PlacementGroup, devices: Sequence[int]) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES on each of these bundles."""
    ask = ray.remote(num_cpus=0, num_gpus=0.01)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    places = {f"GPU {device}": PlacementGroupSchedulingStrategy(bundles, device) for device in devices}
    asked = {gpu: ask.options(scheduling_strategy=place).remote() for gpu, place in places.items()}
    return [*collect(asked, "place", 60.0).values()]
