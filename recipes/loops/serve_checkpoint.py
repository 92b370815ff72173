"""Serves checkpoints: fills engines while they start, and switches between checkpoints.

with local_cluster(RunFolder(Path("runs/serve")), threads_per_actor=1):
    serve([Path("models/one"), Path("models/two")], Fleet("auto", 2, 1), Screen(Console()), sys.stdin)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.actors.holders.detached import NAMESPACE, actor_name, end, names, run_prefix
from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.recipes.fleet.calls import collect
from weightsync.recipes.report.screen import Screen
from weightsync.sources.checkpoint.checkpoint_store import Reading
from weightsync.text import count_text, size_text

_PATIENCE_S = 1800.0
"""Seconds for engines to start and for files to be read."""
_PROMPT = [[1, 2, 3]]


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """`count` engines of a kind, with `tensor_parallel_size` ranks each, under `name` in Ray."""

    kind: str
    count: int
    tensor_parallel_size: int
    name: str

    def start(self, name: str, model: Path) -> ActorHandle[Any]:
        """Start or restart the engine of that name, on GPUs if there are enough."""
        end(actor_name(self.name, name))
        num_gpus = self.tensor_parallel_size
        enough = ray.cluster_resources().get("GPU", 0) >= num_gpus * self.count
        options: dict[str, Any] = {"tensor_parallel_size": num_gpus}
        if enough and choose_engine(self.kind)[0] == "torch":
            options["device"] = "cuda"
        place: dict[str, Any] = {"num_gpus": num_gpus if enough else 0}
        if not enough:  # Ray shows all GPUs to an actor that reserves none
            place["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
        actor = ray.remote(EngineActor).options(
            num_cpus=0, max_restarts=0, name=actor_name(self.name, name), namespace=NAMESPACE, **place
        )
        engine: ActorHandle[Any] = actor.remote(self.kind, str(model), name, options)
        return engine


def serve(models: Sequence[Path], fleet: EngineFleet, screen: Screen, lines: Iterable[str] | None) -> None:
    """Fill `fleet` with the first of `models`, then follow `lines`. Needs a Ray cluster.

    A model is a folder with a ``config.json`` and safetensors files. Engines are built from the first one's
    config. A line names a checkpoint to switch to, or the folder of a new one; ``-NAME`` frees one. A wrong
    line is reported and skipped. Without `lines`, `models` are served in turn.

    Raises:
        WeightSyncError: before the first line, a checkpoint did not fit or engines failed, or engines of that
            name already serve on this cluster.
    """
    begun = time.monotonic()
    if serving := names(run_prefix(fleet.name)):
        raise ConfigError("--name", fleet.name, f"choose another name: it belongs to {', '.join(serving)}")
    engines = {name: fleet.start(name, models[0]) for name in (f"e{i}" for i in range(fleet.count))}
    try:
        with WeightSync(SyncConfig(connect_timeout_s=_PATIENCE_S)) as sync:
            _connect(sync, models, fleet, engines, screen)
            _switch(sync, models[0].name, screen)
            screen.line(f"{models[0].name} is served after {time.monotonic() - begun:.1f} s")
            if lines is not None:
                _obey(sync, {model.name for model in models}, lines, screen)
                return
            for model in models[1:]:
                _switch(sync, model.name, screen)
    finally:
        for name in engines:  # a healed engine has a new handle
            end(actor_name(fleet.name, name))


def _connect(
    sync: WeightSync,
    models: Sequence[Path],
    fleet: EngineFleet,
    engines: dict[str, ActorHandle[Any]],
    screen: Screen,
) -> None:
    """Wait for engines and the first checkpoint, then connect."""
    sync.register_engines(engines, respawn=lambda name: fleet.start(name, models[0]))
    with screen.stage(f"start {count_text(fleet.count, 'engine')}, and read beside them"):
        readings = {model.name: sync.register_checkpoint(model.name, [str(model)]) for model in models}
        collect({f"engine {n}": e.info.remote() for n, e in engines.items()}, "start", _PATIENCE_S)
    (first, reading), *others = readings.items()
    _say_read(first, reading, screen)
    for name, reading in others:  # do not wait for these
        reading.add_done_callback(partial(_say_read_later, name, screen))
    with screen.stage("connect", has_bar=True):
        sync.connect()


def _switch(sync: WeightSync, name: str, screen: Screen) -> None:
    screen.line(str(sync.update_weights(checkpoint=name)))
    begun = time.monotonic()
    calls = {
        f"engine {engine}": handle.generate.remote(_PROMPT, {"max_tokens": 1, "temperature": 0})
        for engine, handle in sync.serving().items()
    }
    made = collect(calls, "generate", _PATIENCE_S)
    tokens = ", ".join(f"{name} {rollout.tokens[0][0]}" for name, rollout in made.items())
    screen.line(f"first token of {name}: {time.monotonic() - begun:.3f} s ({tokens})")


def _obey(sync: WeightSync, registered: set[str], lines: Iterable[str], screen: Screen) -> None:
    for line in filter(None, map(str.strip, lines)):
        try:
            if line.startswith("-"):
                sync.unregister_checkpoint(line[1:])
                registered.discard(line[1:])
                screen.line(f"{line[1:]} is freed")
                continue
            name = Path(line).name
            if line not in registered and Path(line).is_dir():
                reading = sync.register_checkpoint(name, [line])
                registered.add(name)
                _say_read(name, reading, screen)
            _switch(sync, name, screen)
        except WeightSyncError as error:
            screen.line(f"weightsync: {error}")


def _say_read(name: str, reading: Future[Reading], screen: Screen) -> None:
    done = reading.result()
    what = f"{size_text(done.nbytes)} read, {size_text(done.mapped_nbytes)} mapped"
    screen.line(f"read {name}: {done.seconds:.1f} s ({what})")


def _say_read_later(name: str, screen: Screen, reading: Future[Reading]) -> None:
    if reading.cancelled():
        return
    try:
        _say_read(name, reading, screen)
    except WeightSyncError as error:
        screen.line(f"weightsync: {error}")
