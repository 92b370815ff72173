"""The command line: ``weightsync run RECIPE``, ``bench``, ``plan`` and the other commands."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from weightsync import __version__
from weightsync.config import parse_ports
from weightsync.errors import ConfigError, TransportError, WeightSyncError
from weightsync.faults import FaultPlan
from weightsync.recipes.config.recipe import Recipe, load_recipe
from weightsync.recipes.config.schema import markdown as as_markdown
from weightsync.recipes.config.schema import recipe_schema
from weightsync.recipes.doctor.doctor import diagnosis, diagnosis_json, is_fit
from weightsync.recipes.forecast.catalog import load
from weightsync.recipes.forecast.deltas import SlowLink
from weightsync.recipes.forecast.forecast import Scene, forecast, forecast_adapter, planned, recipe_scene
from weightsync.recipes.forecast.hf_model import read_model
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.forecast.parallel import parse_engine, parse_trainers
from weightsync.recipes.inputs import (
    at_least_one,
    check_cluster,
    check_models,
    check_ranks,
    load_fault_plan,
    many_engines,
    recipe_file,
    refuse,
    report_in,
    required,
    runnable_recipe,
    writable,
)
from weightsync.recipes.outcome import BAD_INPUT, DONE, FAILED, INTERRUPTED, complain, with_cluster
from weightsync.recipes.report.page import write_page
from weightsync.recipes.report.run_folder import RunFolder
from weightsync.recipes.report.run_report import read_report
from weightsync.recipes.report.screen import Screen
from weightsync.recipes.report.time_shares import ON_CPUS
from weightsync.report import Covered


class _Commands(TyperGroup):
    """Answers bad input to any command with one line."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 (typer's or click's, by version)
        try:
            return super().invoke(ctx)
        except WeightSyncError as error:
            failed = isinstance(error, TransportError)
            raise typer.Exit(complain(error, FAILED if failed else BAD_INPUT)) from None


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False)


_Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe.")]
_Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one value.")]
_Cluster = Annotated[
    str | None, typer.Option(help="Rates of the links: a YAML file, or hosts of configs/clusters.")
]

_Url = Annotated[
    str, typer.Argument(metavar="URL", help="file:///mnt/policy, s3://bucket/policy or gs://bucket/policy.")
]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"weightsync {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version, and end."),
    ] = False,
) -> None:
    """Moves a model's new weights from the processes that train it to the engines that serve it."""


@app.command()
def run(
    recipe: _Recipe,
    set_: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; if not given, runs/NAME, or runs/NAME-chaos.")
    ] = None,
    chaos: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Faults to inject: a YAML file, or a shipped plan.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json, the spans of each rank in each update.")
    ] = False,
) -> None:
    """Run a recipe. Exits with 0 on success, 1 if the run or the report failed, 2 for bad input."""
    loaded = runnable_recipe(recipe, set_ or [])
    check_cluster(loaded)
    faults = load_fault_plan(chaos, loaded) if chaos is not None else None
    # A run with faults does not replace the results of a run without.
    name = loaded.name if faults is None else f"{loaded.name}-chaos"
    raise typer.Exit(_execute(loaded, out or Path("runs") / name, faults, trace))


@app.command()
def bench(
    recipe: _Recipe,
    updates: Annotated[int, typer.Option(help="How many count; two before them do not.")] = 10,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here, too.")
    ] = None,
    cluster: _Cluster = None,
    set_: _Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model and of logs; runs/NAME-bench if not given.")
    ] = None,
) -> None:
    """Measure the updates of a recipe's fleet, without training or rollouts. Exits like run."""
    loaded = replace(runnable_recipe(recipe, set_ or []), resume=False)
    num_updates, host = at_least_one("--updates", updates), _cluster(cluster)
    if json_ is not None:
        writable("--json", json_)
    expected = forecast(recipe_scene(loaded, host, offloaded=False)) if host else ""

    def inside(folder: RunFolder) -> int:
        screen = Screen(Console())
        if expected:
            screen.line(expected)
        made = _loop("bench", screen).run(loaded, folder.path, screen, num_updates, host)
        if json_ is not None:
            try:
                made.write(json_)
            except OSError as error:
                return complain(f"could not write {json_}: {error.strerror}", FAILED)
        return DONE

    raise typer.Exit(_on_cluster(loaded, out or Path("runs") / f"{loaded.name}-bench", inside))


@app.command()
def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or the name of a shipped recipe; or give --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of configs/models, such as qwen3-8b, or a YAML file; or a folder as Hugging Face "
            "saves it, or a config.json."
        ),
    ] = None,
    trainers: Annotated[
        str | None,
        typer.Option(
            help="fsdp=8, hsdp=4x8 (4 replicas of 8 shards), zero=8 (ZeRO-3) or tp=8,ep=8,pp=2,dp=1."
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="tp=8, tp=8,ep=8 or tp=4,dp=4,ep=16.")] = None,
    engines: Annotated[int | None, typer.Option(help="How many such engines; 1 if not given.")] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Engines have GPUs of their own, and do not share the trainers'.")
    ] = False,
    offloaded: Annotated[
        bool, typer.Option("--offloaded", help="Trainers publish into host memory, not on their GPUs.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="A YAML file, or hosts of configs/clusters, such as 8xh200.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The config.json of a quantised model: the format of the engines."),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="A slow link to each host of engines, such as 10gbit, for deltas.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="The fraction of elements that one update changes, such as 0.02.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of RECIPE.")
    ] = None,
) -> None:
    """Show the bytes of an update and the least time for them, for a recipe or a model. Needs no GPU."""
    host = _cluster(cluster)
    slow = SlowLink.parse(link, density)
    if recipe is not None:
        said: dict[str, object] = {"--model": model, "--trainers": trainers, "--engine": engine}
        said |= {"--engines": engines, "--apart": apart or None, "--quantization": quantization}
        refuse(said, "RECIPE says it; give one or the other")
        loaded = load_recipe(recipe_file(recipe), set_ or [])
        if loaded.trainers.lora:
            models = {"--cluster": cluster, "--offloaded": offloaded or None, "--link": link}
            refuse(models, "leave it out: it is for models")
            print(forecast_adapter(loaded))
            return
        scene = recipe_scene(loaded, host, offloaded=offloaded, link=slow)
    else:
        refuse({"--set": set_}, "it replaces a value of RECIPE, and none is given")
        name, shape, tensors = read_model(required("--model", model))
        scene = Scene(
            name=name,
            model=shape,
            tensors=tensors,
            trainers=parse_trainers(required("--trainers", trainers)),
            engines=many_engines(parse_engine(required("--engine", engine)), engines, quantization),
            apart=apart,
            offloaded=offloaded,
            cluster=host,
            link=slow,
        )
    print(forecast(scene))


@app.command("serve-checkpoint")
def serve_checkpoint(
    models: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help="Folders with a config.json and safetensors files.")
    ],
    engines: Annotated[int, typer.Option(help="How many.", min=1)] = 1,
    kind: Annotated[str, typer.Option(help="auto, vllm, sglang or torch.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks of each engine.", min=1)] = 1,
    name: Annotated[str, typer.Option(help="Under which Ray finds the engines.")] = "serve-checkpoint",
    check: Annotated[
        bool, typer.Option("--check", help="End after the first tokens of each checkpoint.")
    ] = False,
) -> None:
    """Fill engines with checkpoints that are read while the engines start, and switch between them.

    A line on standard input names the checkpoint to switch to, or the folder of another one; -NAME frees one.
    """
    check_models(models)
    check_ranks("--kind", kind, "--tensor-parallel-size", tensor_parallel_size)
    folder = RunFolder(Path("runs/serve-checkpoint"))

    def inside() -> int:
        screen = Screen(Console())
        made = _loop("serve_checkpoint", screen)
        fleet = made.EngineFleet(kind, engines, tensor_parallel_size, name)
        made.serve(models, fleet, screen, None if check else _lines())
        return DONE

    raise typer.Exit(with_cluster(folder, engines, inside))


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With safetensors files.")],
    url: _Url,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Upload all files whole, also those that are there.")
    ] = False,
    keep: Annotated[
        int | None, typer.Option(help="Then remove what no follower of the last KEEP versions needs.", min=1)
    ] = None,
    copy: Annotated[
        Path | None, typer.Option(help="Folder for a copy of the newest version; in ~/.cache if not given.")
    ] = None,
) -> None:
    """Publish a checkpoint's folder as the next version of a store: what changed, or all if that is less."""
    from weightsync.recipes.stores import publish_folder

    publish_folder(folder, url, copy, keep, Screen(Console()).line, anchor=anchor)


@app.command()
def follow(
    url: _Url,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The version is in FOLDER/current.")],
    version: Annotated[int | None, typer.Option(help="End at this version.", min=1)] = None,
    once: Annotated[bool, typer.Option("--once", help="End at the newest version.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the store.", min=0.01)] = 5.0,
) -> None:
    """Keep a local folder at the newest version of a store, until Ctrl-C (exit code 130)."""
    from weightsync.recipes.stores import follow_store

    try:
        follow_store(url, folder, version, Screen(Console()).line, once=once, every_s=every)
    except KeyboardInterrupt:
        raise typer.Exit(complain("interrupted", INTERRUPTED)) from None


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, such as runs/quickstart.")],
    cluster: _Cluster = None,
) -> None:
    """Make a run's report.html again from report.json, and print a summary.

    With --cluster, both compare the last update with the least time that the links allow.
    """
    host = _cluster(cluster)
    made = read_report(report_in(folder))
    write_page(made, folder / "report.html", host)
    screen = Screen(Console())
    screen.summary(made, host)
    if host and made.devices.startswith("CPUs"):
        screen.line(ON_CPUS.format(host[0]))
    screen.line(f"report: {folder / 'report.html'}")


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="docs/configuration.md instead.")] = False,
) -> None:
    """Print the JSON Schema of recipes, which editors use to complete and check them."""
    document = recipe_schema()
    print(as_markdown(document) if markdown else json.dumps(document, indent=1) + "\n", end="")


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write them, for sync.tls.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host with its own certificate, in FOLDER/HOST. Without any, one for all."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.", min=1, max=36500)] = 90,
) -> None:
    """Make the files of sync.tls: a CA, and a certificate with its key. Overwrites nothing.

    Copy FOLDER, or FOLDER/HOST, to the same path of each host. Whoever has a key can join the run.
    """
    from weightsync.protocol.certificates import make_keys  # imports a library that only TLS needs

    try:
        made, until = make_keys(folder, host or [], days)
    except OSError as error:
        raise ConfigError("FOLDER", str(folder), f"{error.strerror}: give a folder to write to") from None
    for each in made:
        print(f"{each}: ca.pem, certificate.pem and key.pem, valid until {until:%Y-%m-%d}")


@app.command()
def doctor(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE|DIR]",
            help="Also show the models of the engines of a recipe, or of a run's folder.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rows for programs instead of lines.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="All hosts of a running Ray cluster, and each pair of them.")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="The cluster's head, host:port; auto if not given.")
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(metavar="FIRST-LAST", help="The range for sync.ports; any port if not given."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that each answer of a host may take; 10 if not given.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Also show what strangers may call at a server of vLLM or SGLang."),
    ] = None,
) -> None:
    """Check this machine, and show a remedy for each missing thing. Exits with 1 if anything is missing.

    With a recipe or the folder of a run, also show the models that the engines serve, and the routes to them.
    With --cluster, examine the hosts of a Ray cluster, and measure the links between them.
    """
    if cluster:
        refuse({"RECIPE or DIR": what, "--server": server}, "leave it out: --cluster is about hosts")
        raise typer.Exit(
            _examine_cluster(address or "auto", ports, 10.0 if timeout is None else timeout, as_json)
        )
    refuse({"--address": address, "--ports": ports, "--timeout": timeout}, "it goes with --cluster")
    from weightsync.recipes.doctor.probes import diagnose  # imports torch and looks for engines
    from weightsync.recipes.doctor.servers import server as examine_server

    planned = what is not None and not os.path.isdir(what)
    served = None if what is None else _served(what)
    rows = [*map(examine_server, server or ()), *diagnose()]
    print(diagnosis_json(rows, served) if as_json else diagnosis(rows, served, planned=planned))
    raise typer.Exit(DONE if is_fit(rows) else FAILED)


def _served(what: str) -> list[Covered]:
    """Return the rows of the engines of a run, given a folder, or of a recipe."""
    if os.path.isdir(what):
        return read_report(report_in(Path(what))).coverage
    return planned(load_recipe(recipe_file(what), []))


def _examine_cluster(address: str, ports: str | None, timeout_s: float, as_json: bool) -> int:
    if not 0 < timeout_s < float("inf"):
        raise ConfigError("--timeout", timeout_s, "give seconds above 0, such as 10")
    given = None if ports is None else parse_ports(ports, field="--ports")
    found = importlib.import_module("weightsync.recipes.doctor.cluster_doctor").examine(
        address, given, timeout_s
    )
    print(json.dumps(found.as_json(), indent=1) if as_json else found.text())
    return FAILED if found.problems() else DONE


def main() -> None:
    """Entry point of the console script."""
    app()


def _lines() -> Iterator[str]:
    """Yield lines of standard input. At the end of the input, block until the process ends."""
    yield from sys.stdin
    threading.Event().wait()


def _cluster(given: str | None) -> tuple[str, HostSpec] | None:
    return (given, load(HostSpec, given, field="--cluster", kind="clusters")) if given else None


def _execute(recipe: Recipe, out: Path, chaos: FaultPlan | None, trace: bool) -> int:
    def inside(folder: RunFolder) -> int:
        screen = Screen(Console())
        report = _loop("quickstart", screen).run(recipe, folder, screen, chaos, trace=trace)
        if not folder.complaint():
            screen.line(f"report: {folder.path / 'report.json'}, {folder.path / 'report.html'}")
        if report.status == "done":
            return DONE
        reached = f"the mean reward of the last steps is {report.final_reward:.3f}"
        wanted = f"loop.target_reward {recipe.loop.target_reward:g}"
        return complain(f"{wanted} was not reached: {reached}", FAILED)

    return _on_cluster(recipe, out, inside)


def _on_cluster(recipe: Recipe, out: Path, inside: Callable[[RunFolder], int]) -> int:
    folder = RunFolder(out)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(folder.path), str(error)) from error
    num_at_once = max(recipe.trainers.count, len(recipe.engine_specs))
    return with_cluster(folder, num_at_once, lambda: inside(folder))


def _loop(module: str, screen: Screen) -> Any:  # noqa: ANN401 (a module)
    """Import a loop only now: see local_cluster, and bad input need not wait for torch and transformers."""
    with screen.stage("load torch and transformers"):
        return importlib.import_module(f"weightsync.recipes.loops.{module}")


if __name__ == "__main__":
    main()
