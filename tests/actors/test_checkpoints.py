"""Engines that are filled from safetensors files, without any trainer."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from rich.console import Console
from safetensors.torch import save_file

from tests.families import build_family
from tests.fleets.actors import Engine, HeldShard, Trainer, build, counts, forget, spawn
from tests.fleets.command import weightsync
from tests.fleets.faulty import pid
from tests.fleets.local_cluster import forking_python
from tests.models import build_tiny_qwen3, greedy
from tests.pages import run_block
from tests.patience import patient
from tests.terminal import Terminal
from weightsync import ConfigError, PlanError, SyncConfig, WeightSync
from weightsync.actors.checkpoints.followed_store import FollowedStore
from weightsync.actors.engine import EngineActor
from weightsync.actors.holders.detached import NAMESPACE, actor_name
from weightsync.actors.holders.weight_holder import spawn_standby
from weightsync.errors import PeerLostError, SourceChangedError, StateError, StoreError
from weightsync.plan.layout.formats import Format
from weightsync.quantising.quantize import quantize
from weightsync.recipes.loops.serve_checkpoint import EngineFleet, serve
from weightsync.recipes.report.screen import Screen
from weightsync.stores.local_folder import LocalFolder
from weightsync.stores.manifest import manifest_name
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.publishing import publish

WIDTH = 512
Make = Callable[..., WeightSync]
Weights = Mapping[str, torch.Tensor]


def weights(seed: int) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=draw) for name, t in build(WIDTH).state_dict().items()}


def save(folder: Path, tensors: Weights) -> str:
    """In two files."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    for number, part in enumerate((names[:1], names[1:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def engines(cluster: None) -> dict[str, Any]:
    return {f"e{i}": spawn(Engine, WIDTH, f"e{i}", f"c{i}") for i in range(2)}


@pytest.fixture
def make(engines: dict[str, Any]) -> Iterator[Make]:
    made: list[WeightSync] = []

    def run(**settings: object) -> WeightSync:
        sync = WeightSync(SyncConfig(**({"bucket_bytes": 65536, "timeout_s": patient(10)} | settings)))
        sync.register_engines(engines)
        made.append(sync)
        return sync

    forget(engines.values())
    yield run
    for sync in made:
        sync.close()


def all_hold(sync: WeightSync, wanted: Weights) -> bool:
    found = ray.get([engine.weights.remote() for engine in sync.engines().values()])
    return all(torch.equal(held[name], wanted[name]) for held in found for name in wanted)


def memory(sync: WeightSync, name: str) -> tuple[list[int], list[int]]:
    """Memory files of ours that are mapped: by those who read checkpoint `name`, and by the holders."""
    readers = sync.checkpoint_readers(name).values()
    holders = [*sync.holders().values()]
    count = [
        [h.__ray_call__.remote(lambda _: counts().num_segments) for h in side] for side in (readers, holders)
    ]
    return ray.get(count[0]), ray.get(count[1])


def test_two_checkpoints_are_registered_and_switched(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.actors.checkpoints.checkpoint_shard.CheckpointShard", HeldShard)
    early: list[Any] = []
    monkeypatch.setattr(
        "weightsync.actors.holders.standbys.spawn_standby",
        lambda *at: early.append(spawn_standby(*at)) or early[-1],
    )
    a, b = weights(1), weights(2)
    folders = [save(tmp_path / "a", a), save(tmp_path / "b", b)]
    (tmp_path / "a" / "go").touch()
    sync = make()
    reading, later = (sync.register_checkpoint(Path(folder).name, [folder]) for folder in folders)
    assert reading.result().nbytes + reading.result().mapped_nbytes == sum(t.nbytes for t in a.values())
    standbys = {pid(standby) for standby in early}
    sync.connect()  # waits for the first alone
    assert {pid(holder) for holder in sync.holders().values()} == standbys, "those started early hold it"
    first = sync.update_weights(checkpoint="a")
    assert (first.version, first.checkpoint, all_hold(sync, a)) == (1, "a", True)
    with pytest.raises(ConfigError, match="did you mean 'a'"):
        sync.update_weights(checkpoint="aa")
    with pytest.raises(ConfigError, match="did you mean 'a'"):
        sync.checkpoint_readers("aa")
    ray.kill(*sync.checkpoint_readers("a").values())
    with pytest.raises(PeerLostError, match="checkpoint a on host"):
        sync.update_weights(checkpoint="a")
    assert sync.engine_versions() == {"e0": 1, "e1": 1}
    sync.unregister_checkpoint("a")
    again = sync.register_checkpoint("a", [str(tmp_path / "a")])
    with ThreadPoolExecutor(1) as thread, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", shown := Terminal())
        update = thread.submit(sync.update_weights, checkpoint="a")
        assert not wait([later, again, update], 1.5).done  # a is read after b
        (tmp_path / "b" / "go").touch()
        assert update.result(patient(30)).version == 2
    assert "read a" in shown.getvalue()
    assert all_hold(sync, a)
    for version, (name, wanted) in enumerate([("b", b), ("a", a), ("b", b)], start=3):
        report = sync.update_weights(checkpoint=name)
        assert (report.version, report.checkpoint, report.epoch) == (version, name, first.epoch)
        assert f"({name})" in str(report)
        assert all_hold(sync, wanted)
    assert sync.engine_versions() == {"e0": 5, "e1": 5}


def test_a_file_that_is_replaced_after_its_checkpoint_was_registered_is_named(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.actors.checkpoints.checkpoint_shard.CheckpointShard", HeldShard)
    a, b, new = weights(1), weights(2), weights(3)
    sync = make()
    for name, held in (("a", a), ("b", b)):
        sync.register_checkpoint(name, [save(tmp_path / name, held)])
    (tmp_path / "a" / "go").touch()
    sync.connect()
    served = sync.update_weights(checkpoint="a").engines
    file = tmp_path / "b" / "model-1.safetensors"
    save_file({name: new[name] for name in sorted(new)[1:]}, tmp_path / "other", {"longer": "header"})
    os.replace(tmp_path / "other", file)
    (tmp_path / "b" / "go").touch()
    for _ in range(2):
        with pytest.raises(SourceChangedError, match="changed since the checkpoint was first read") as caught:
            sync.update_weights(checkpoint="b")
        assert caught.value.files == (str(file),)
    assert sync.engine_versions() == served
    assert all_hold(sync, a)
    sync.unregister_checkpoint("b")
    sync.register_checkpoint("b", [str(tmp_path / "b")])
    assert sync.update_weights(checkpoint="b").version == served["e0"] + 1
    assert all_hold(sync, {**new, sorted(new)[0]: b[sorted(new)[0]]})


def test_float8_weights_and_their_scales_fill_engines_of_full_precision(make: Make, tmp_path: Path) -> None:
    form = Format(rule="fp8", values="float8_e4m3fn", block=(128, 128))
    stored, wanted = weights(3), weights(3)
    for name in [name for name in stored if name.endswith("weight")]:
        values, scales = (part for _, part in quantize(wanted[name].bfloat16(), form))
        stored |= {name: values, f"{name}_scale_inv": scales}
        of_row, of_column = (torch.arange(size) // 128 for size in values.shape)
        wanted[name] = (values.float() * scales[of_row][:, of_column]).bfloat16().float()
    folder = save(tmp_path / "float8", stored)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "float8" / "config.json").write_text(json.dumps(config))
    sync = make()
    sync.register_checkpoint("float8", [folder])
    sync.connect()
    assert sync.update_weights(checkpoint="float8").verified
    assert all_hold(sync, wanted)


def test_a_store_brings_engines_to_its_newest_version(
    engines: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    store, copy = f"file://{tmp_path}/store", LocalFolder(tmp_path / "copy")
    held = dict(weights(1))
    bucket = ObjectStore(store, make=True)

    def publish_one() -> int:
        return publish(bucket, Path(save(tmp_path / "model", held)), copy).version

    publish_one()
    names = {"WeightSync": make, "engines": engines}
    folders = {"s3://bucket/policy": store, "/dev/shm": str(tmp_path)}
    known = run_block("docs/stores.md", 0, names, folders)
    sync, first = known["sync"], known["report"]
    assert (first.version, first.checkpoint, first.verified, all_hold(sync, held)) == (
        1,
        "store@1",
        True,
        True,
    )
    for _ in range(3):
        held["1.bias"] = held["1.bias"] + 1
        newest = publish_one()
    assert sync.update_weights(checkpoint="store").checkpoint == "store@4"
    assert all_hold(sync, held)
    assert sync.update_weights(checkpoint="store").version == 3
    with pytest.raises(ConfigError, match="choose a name other than store, store@4"):
        sync.register_store(store)
    served = dict(held)
    held["1.bias"] = held["1.bias"] + 1
    newest = publish_one()
    manifest = tmp_path / "store" / manifest_name(newest)
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-9])
    for update in (sync.update_weights, lambda **which: sync.update_weights_async(**which).result()):
        with pytest.raises(StoreError, match=r"5.json of version 5: it is damaged"):
            update(checkpoint="store")
    assert all_hold(sync, served)
    manifest.write_bytes(good)
    assert sync.update_weights(checkpoint="store").checkpoint == "store@5"
    assert all_hold(sync, held)
    sync.unregister_checkpoint("store")
    with pytest.raises(ConfigError):
        sync.update_weights(checkpoint="store")


def test_a_file_that_is_written_after_its_hash_and_before_its_reading_is_not_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, copy = dict(weights(1)), LocalFolder(tmp_path / "copy")
    bucket = ObjectStore(f"file://{tmp_path}/store", make=True)
    publish(bucket, Path(save(tmp_path / "model", held)), copy)
    sync = make()
    sync.register_store(bucket.url, folder=tmp_path / "followed")
    sync.connect()
    assert sync.update_weights(checkpoint="store").verified
    served = dict(held)
    held["1.bias"] = held["1.bias"] + 1
    publish(bucket, Path(save(tmp_path / "model", held)), copy)
    follow = FollowedStore.follow

    def then_written(self: FollowedStore) -> tuple[str, Path]:
        name, files = follow(self)
        with (files / "model-0.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        return name, files

    monkeypatch.setattr(FollowedStore, "follow", then_written)
    with pytest.raises(SourceChangedError, match=r"model-0.safetensors changed"):
        sync.update_weights(checkpoint="store")
    assert all_hold(sync, served)
    monkeypatch.setattr(FollowedStore, "follow", follow)
    assert sync.update_weights(checkpoint="store").checkpoint == "store@2"
    assert all_hold(sync, held)
    (tmp_path / "followed" / "current" / "model-1.safetensors").touch()
    assert sync.update_weights(checkpoint="store").checkpoint == "store@2"
    assert all_hold(sync, held)


@pytest.mark.faults
def test_what_lies_in_memory_is_mapped_and_freed_by_unregistering(make: Make, tmp_path: Path) -> None:
    """No memory is taken for it but the holders' two buckets, and the files stay."""
    a, b = weights(1), weights(2)
    nbytes = sum(tensor.nbytes for tensor in a.values())
    shm = Path("/dev/shm") / f"weightsync-test-{os.getpid()}"
    sync = make(keep_versions=1)
    try:
        folder = save(shm, a)
        read = sync.register_checkpoint("a", [folder]).result()
        assert (read.nbytes, read.mapped_nbytes) == (0, nbytes)
        sync.connect()
        sync.update_weights(checkpoint="a")
        assert all_hold(sync, a)
        assert memory(sync, "a") == ([0], [2, 2])  # buckets, of which two are not as large as the model
        assert 2 * sync.plan.max_bucket_nbytes < nbytes
        sync.register_checkpoint("b", [save(tmp_path / "b", b)]).result()
        sync.update_weights(checkpoint="b")
        assert memory(sync, "b") == ([2], [4, 3])  # the second holder sends nothing of the first file
        (reader,) = sync.checkpoint_readers("b").values()
        maps = Path("/proc") / str(ray.get(reader.__ray_call__.remote(lambda _: os.getpid()))) / "maps"
        assert "memfd:weightsync" in maps.read_text()
        sync.unregister_checkpoint("b")
        assert memory(sync, "a") == ([0], [2, 2])
        assert not maps.exists() or "memfd:weightsync" not in maps.read_text()
        assert all_hold(sync, b)
        sync.update_weights(checkpoint="a")
        assert all_hold(sync, a)
        last = np.memmap(f"{folder}/model-0.safetensors", np.uint8, "r+")[-1:]
        wrote = pytest.raises(SourceChangedError, match=rf"another process wrote 0.bias .*; {folder}/model-0")
        for outcome in (wrote, nullcontext()):  # a mapping gives no file a new time
            last ^= 1
            with outcome:
                sync.update_weights(checkpoint="a")
        assert all_hold(sync, a)
        version = sync.version
        os.utime(f"{folder}/model-0.safetensors")
        with pytest.raises(SourceChangedError, match=f"^{folder}/model-0.* changed since the checkpoint"):
            sync.update_weights(checkpoint="a")
        assert set(sync.engine_versions().values()) == {version}
        sync.unregister_checkpoint("a")
        sync.register_checkpoint("a", [folder])
        sync.update_weights(checkpoint="a")
        assert all_hold(sync, a)
    finally:
        for file in shm.glob("*"):
            file.unlink()
        shm.rmdir()


@pytest.mark.faults
def test_an_engine_that_is_killed_is_healed_without_trainers(
    engines: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    def respawn(name: str) -> Any:
        engines[name] = spawn(Engine, WIDTH, name, f"c{name[1:]}")
        return engines[name]

    a = weights(1)
    sync = make()
    sync.register_engines(engines, respawn=respawn)
    sync.register_checkpoint("a", [save(tmp_path, a)])
    sync.connect()
    sync.update_weights(checkpoint="a")
    sync.settle(patient(30))
    os.kill(ray.get(engines["e1"].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    while not sync.heals:
        sync.settle(patient(30))
    assert sync.heals[0].verified
    assert sync.engine_versions() == {"e0": 1, "e1": 1}
    assert all_hold(sync, a)


@pytest.mark.faults
def test_holders_are_replaced_though_who_read_another_checkpoint_is_gone(make: Make, tmp_path: Path) -> None:
    sync = make()
    for seed, name in enumerate("ab"):
        sync.register_checkpoint(name, [save(tmp_path / name, weights(seed))])
    sync.connect()
    sync.update_weights(checkpoint="a")
    ray.kill(*sync.checkpoint_readers("a").values())
    ray.kill(sync.holders()["holder 1"])
    with suppress(PeerLostError):  # of the holder, unless that was noticed before
        sync.update_weights(checkpoint="b")
    sync.update_weights(checkpoint="b")
    assert all_hold(sync, weights(1))
    with pytest.raises(PeerLostError, match="checkpoint a on host"):
        sync.update_weights(checkpoint="a")


@pytest.mark.faults
def test_trainers_take_over_from_a_checkpoint(make: Make, tmp_path: Path) -> None:
    a = weights(1)
    sync = make()
    sync.register_checkpoint("a", [save(tmp_path, a)])
    sync.connect()
    sync.update_weights(checkpoint="a")
    trainer = spawn(Trainer, WIDTH, "t")
    sync.register_trainers([trainer])
    with pytest.raises(ConfigError, match="leave it out: trainers are registered"):
        sync.update_weights(checkpoint="a")
    assert sync.update_weights(2).checkpoint == ""
    assert all_hold(sync, ray.get(trainer.weights.remote()))
    sync.unregister_checkpoint("a")


@pytest.mark.faults
def test_what_cannot_be_taken_is_refused_before_engines_are_touched(make: Make, tmp_path: Path) -> None:
    a = weights(1)
    good = save(tmp_path / "a", a)
    sync = make()
    with pytest.raises(StateError, match="register_trainers"):
        sync.connect()
    with pytest.raises(ConfigError, match="there is no nowhere"):
        sync.register_checkpoint("a", [str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="give a list of paths"):
        sync.register_checkpoint("a", good)
    with pytest.raises(ConfigError, match="give each host once: "):
        sync.register_checkpoint("a", [good], nodes=["here"])
    wide = save(tmp_path / "wide", a | {"0.bias": torch.zeros(WIDTH + 1)})
    sync.register_checkpoint("wide", [wide])
    with pytest.raises(PlanError, match=r"0.bias: shape \(513,\).*; it is in .*model-0.safetensors"):
        sync.connect()
    with pytest.raises(PlanError, match=r"0.bias: .*model-0.safetensors.*unregister wide first"):
        sync.register_checkpoint("a", [good])
    sync.unregister_checkpoint("wide")
    sync.register_checkpoint("a", [good])
    with pytest.raises(ConfigError, match="choose a name other than a"):
        sync.register_checkpoint("a", [good])
    sync.connect()
    with pytest.raises(ConfigError, match="valid: a"):
        sync.unregister_checkpoint("c")
    with pytest.raises(ConfigError, match="valid: a"):
        sync.update_weights(1)
    assert set(sync.engine_versions().values()) == {0}
    sync.update_weights(checkpoint="a")


PROMPTS = [[1, 2, 3], [7, 5]]


@pytest.mark.parametrize(
    "num_switches", [pytest.param(2), pytest.param(100, marks=[pytest.mark.faults, pytest.mark.timeout(600)])]
)
def test_greedy_tokens_follow_each_switch(tmp_path: Path, num_switches: int) -> None:
    models = {name: build_tiny_qwen3(tmp_path / name, seed=seed) for seed, name in enumerate("ab", start=1)}
    wanted = {name: greedy(model, PROMPTS, 4) for name, model in models.items()}
    assert wanted["a"] != wanted["b"]
    spawn_engine = partial(spawn, EngineActor, "torch", str(tmp_path / "a"))
    with WeightSync(SyncConfig(bucket_bytes=65536)) as sync:
        engines = {"e0": spawn_engine("e0")}
        sync.register_engines(engines)
        for name in models:
            sync.register_checkpoint(name, [str(tmp_path / name)])
        sync.connect()
        for turn in range(num_switches):
            name = "ab"[turn % 2]
            assert sync.update_weights(checkpoint=name).verified
            rollout = ray.get(engines["e0"].generate.remote(PROMPTS, {"max_tokens": 4, "temperature": 0}))
            assert (rollout.tokens, rollout.version) == (wanted[name], turn + 1)
    ray.kill(engines["e0"])


def test_the_command_leaves_engines_of_another_alone(tmp_path: Path, cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Engine:
        def ready(self) -> bool:
            return True

    name = actor_name("serve-checkpoint", "e0")
    other = Engine.options(name=name, namespace=NAMESPACE).remote()
    ray.get(other.ready.remote())
    build_tiny_qwen3(tmp_path / "one", seed=1)
    address = ray.get_runtime_context().gcs_address
    joined = {"RAY_ADDRESS": address, "python": forking_python()}
    done = weightsync("serve-checkpoint", str(tmp_path / "one"), cwd=tmp_path, **joined)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--name: 'serve-checkpoint'" in done.stderr
    assert f"choose another name: it belongs to {name}" in done.stderr
    assert ray.get(other.ready.remote())
    ray.kill(other)


@pytest.mark.faults
def test_the_command_serves_and_obeys_lines(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where names are folders, too
    monkeypatch.setattr("weightsync.actors.checkpoints.checkpoint_shard.CheckpointShard", HeldShard)
    early: list[Any] = []
    monkeypatch.setattr(
        "weightsync.actors.holders.standbys.spawn_standby",
        lambda *at: early.append(spawn_standby(*at)) or early[-1],
    )
    models = [tmp_path / "one", tmp_path / "two"]
    tokens = {m.name: greedy(build_tiny_qwen3(m, seed=i), [[1, 2, 3]], 1)[0][0] for i, m in enumerate(models)}
    (models[0] / "go").touch()
    console = Console(file=io.StringIO())

    def lines() -> Iterator[str]:  # asked for while the second is still to be read
        os.truncate(models[1] / "model.safetensors", 40)
        (models[1] / "go").touch()
        yield from ("two", "-two", "three")
        build_tiny_qwen3(models[1], seed=1)
        yield from ("two", "-one", "-one", "one", "two")

    serve(models, EngineFleet("torch", 1, 1, "it"), Screen(console), lines())
    said = console.file.getvalue()
    assert re.findall(r"first token of (\w+): .* \(engine e0 (\d+)\)", said) == [
        (name, str(tokens[name])) for name in ("one", "two", "one", "two")
    ]
    mistakes = [line for line in said.splitlines() if line.startswith("weightsync: ")]
    assert [re.split(" is not valid| since", mistake)[0] for mistake in mistakes] == [
        *[f"weightsync: {models[1] / 'model.safetensors'} changed"] * 2,  # as it is read, and wanted
        "weightsync: checkpoint: 'three'",
        "weightsync: checkpoint: 'one'",
    ]
    assert "version 4 (two)" in said


FAMILY_PROMPTS = [[5, 6, 7], [200, 3, 90, 41]]
SAMPLING = {"max_tokens": 8, "temperature": 0.0}
VLLM = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}


def engine_options(family: str) -> dict[str, dict[str, Any]]:
    """Return the options of each kind of engine that serves a family here."""
    kinds: dict[str, dict[str, Any]] = {"torch": {}}
    has_images = family == "gemma3"
    if importlib.util.find_spec("vllm") and (not has_images or importlib.util.find_spec("torchvision")):
        kinds["vllm"] = VLLM | (TEXT_ONLY if has_images else {})
    return kinds


@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["gemma3", "mixtral", "nemotron_h"])
def test_engines_answer_as_the_checkpoint_that_was_registered(
    family: str, cluster: None, tmp_path: Path
) -> None:
    models = [build_family(tmp_path / str(seed), family, seed) for seed in range(2)]
    kinds = engine_options(family)
    engines = {
        kind: spawn(EngineActor, kind, str(tmp_path / "0"), kind, options, kind)
        for kind, options in kinds.items()
    }
    with WeightSync(SyncConfig(timeout_s=patient(60), connect_timeout_s=patient(120))) as sync:
        for seed in range(2):
            sync.register_checkpoint(str(seed), [str(tmp_path / str(seed))])
        sync.register_engines(engines)
        sync.connect()
        for seed in (0, 1):
            report = sync.update_weights(checkpoint=str(seed))
            assert report.verified
            for engine in engines.values():
                rollout = ray.get(engine.generate.remote(FAMILY_PROMPTS, SAMPLING))
                assert rollout.tokens == greedy(models[seed], FAMILY_PROMPTS, 8)
    for engine in engines.values():
        ray.get(engine.close.remote())
        ray.kill(engine)
