"""Tests imports between rooms and the light public package.

A room imports only from floors below its own. Rooms of one floor do not know each other, and only the edge
knows Ray::

    recipes
    actors        plugins     testing       extend
    driver        holder      engines       sources
    collectives   node          experts
    channel       readers     transports    stores
    quantising    deltas
    memory        report
    protocol      faults
    plan
    config        errors        text
"""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import weightsync.extend
from weightsync.faults import FaultPlan
from weightsync.recipes.config.recipe import load_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = ("weightsync", "actors", "recipes")
"""`weightsync` has links to the others, which are imported as ``weightsync.actors`` and ``.recipes``."""

PURE = (
    "weightsync.plan",
    "weightsync.protocol.timing",
    "weightsync.errors",
    "weightsync.text",
    "weightsync.config",
    "weightsync.driver.healing.healing_policy",
    "weightsync.report",
    "weightsync.driver.engine_state",
)
PURE_ALLOWED = (*sys.stdlib_module_names, "_typeshed", "numpy")
PLAN_ALLOWED = (*PURE_ALLOWED, "weightsync.plan", "weightsync.errors", "weightsync.text")
HEAVY = ("cupy", "vllm", "sglang", "mooncake", "verl")
PLUGINS = ("weightsync.plugins",)
"""Each module is imported only by the framework that it is for."""
EDGE = ("weightsync.actors", "weightsync.recipes", *PLUGINS)
UNPICKLERS = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing")
BY_ENGINES_CHANNELS = (
    "weightsync.engines.sglang.api",
    "weightsync.engines.sglang.worker",
    "weightsync.engines.vllm.adapter",
    "weightsync.engines.vllm.worker",
)
"""Modules that pickle for vLLM's and SGLang's own channels. None of them has a socket of ours."""
USERS_OWN = ("weightsync.recipes.loops.openrlhf_loop",)
"""Recipes that stand for a user's own loop and engines."""
WALL_CLOCK = {
    "weightsync/protocol/timing.py": "stamps of spans and heals",
    "weightsync/protocol/certificates.py": "when a certificate expires",
    "weightsync/sources/checkpoint/stored_files.py": "times of files are compared",
    "recipes/report/run_report.py": "when a run started, and a step committed",
    "recipes/report/bench_report.py": "when a benchmark started",
    "recipes/doctor/host_probe.py": "clocks of hosts are compared",
    "benchmarks/common.py": "when a benchmark was run",
}
"""Where the wall clock may be read, for time stamps. Durations use a clock that is never set."""
FLOORS = (
    ("weightsync.errors", "weightsync.text"),
    ("weightsync.config",),
    ("weightsync.plan",),
    ("weightsync.protocol", "weightsync.faults"),
    ("weightsync.memory", "weightsync.report"),
    ("weightsync.quantising", "weightsync.deltas"),
    ("weightsync.channel", "weightsync.readers", "weightsync.transports", "weightsync.stores"),
    ("weightsync.collectives", "weightsync.experts", "weightsync.node"),
    ("weightsync.driver", "weightsync.holder", "weightsync.engines", "weightsync.sources"),
    ("weightsync.testing", "weightsync.extend", "weightsync.actors"),
    ("weightsync.recipes", *PLUGINS),
)
"""Rooms, from the ground up."""
DRIVER = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "weightsync/driver").rglob("[!_]*.py"))
]
MOST_IN_ROOT = 8


@dataclass(frozen=True)
class Import:
    """`importer` (a module of ours) imports `module`, absolute, at `where`."""

    importer: str
    module: str
    where: str
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.importer} imports {self.module}"


@functools.cache
def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@functools.cache
def room(module: str) -> tuple[int, str]:
    """Return the floor and the room of one of our modules."""
    for floor, rooms in enumerate(FLOORS):
        for each in rooms:
            if inside(module, (each,)):
                return floor, each
    raise LookupError(f"{module} is in no room")


def source_files(root: Path) -> list[Path]:
    """Return source files, sorted. Links are not followed."""
    return sorted(path for folder in FOLDERS for path in _files(root / folder))


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder)):
            yield path


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "weightsync" else ("weightsync", *parts)).removesuffix(".__init__")


def imports(root: Path) -> list[Import]:
    """Return every import of our packages, also those in functions and for type checkers."""
    files = {module_name(path, root): path for path in source_files(root)}
    return [
        Import(importer, target, f"{where}:{node.lineno}", in_function, for_types)
        for importer, path in files.items()
        for where in [path.relative_to(root)]
        for node, in_function, for_types in _import_statements(path.read_text())
        for target in _targets(node, importer, is_package=path.name == "__init__.py", ours=files.keys())
    ]


def nodes(path: Path, text: str) -> Iterator[ast.AST]:
    """Walk the syntax tree of a file in which the regular expression `text` is found: trees take time."""
    source = path.read_text()
    return ast.walk(ast.parse(source)) if re.search(text, source) else iter(())


@functools.cache
def _import_statements(source: str) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    return [*_statements(ast.parse(source))]


def _statements(
    node: ast.AST, in_function: bool = False, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # no statement is in it
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function, for_types
        enters = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        guarded = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        yield from _statements(child, in_function or enters, for_types or guarded)


def _targets(
    node: ast.Import | ast.ImportFrom, importer: str, *, is_package: bool, ours: Set[str]
) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    parts = importer.split(".")
    base = parts[: len(parts) - node.level + is_package] if node.level else []
    package = ".".join([*base, *filter(None, [node.module])])
    # `from weightsync import plan` imports weightsync.plan, not the public package
    return {full if (full := f"{package}.{alias.name}") in ours else package for alias in node.names}


def violations(root: Path) -> list[str]:
    """Return forbidden imports, one line each."""
    found = [item for item in imports(root) if item.importer != "weightsync"]
    broken = [f"{item}: {rule}" for item in found for rule in _broken_rules(item)]
    for library in HEAVY:
        ours = [item for item in found if not inside(item.importer, (*USERS_OWN, *PLUGINS))]
        homes = {item.importer for item in ours if inside(item.module, (library,))}
        if len(homes) > 1:
            broken.append(f"{library} is imported in {sorted(homes)}: it has one home")
    return broken


def _broken_rules(item: Import) -> Iterator[str]:
    importer, module = item.importer, item.module
    if inside(importer, ("weightsync.plan",)) and not inside(module, PLAN_ALLOWED):
        yield "the plan knows numpy and errors, nothing else"
    elif inside(importer, PURE) and not inside(module, (*PURE_ALLOWED, *PURE)):
        yield "this module is pure"
    if inside(module, ("ray",)) and not inside(importer, EDGE):
        yield "only the edge knows Ray"
    if inside(module, HEAVY) and not (item.in_function or item.for_types or inside(importer, PLUGINS)):
        yield "import it in a function, on use"
    if inside(module, PLUGINS) and not inside(importer, PLUGINS):
        yield "its framework imports a plug-in, we do not"
    if inside(module, UNPICKLERS) and importer not in BY_ENGINES_CHANNELS:
        yield "what arrives on our sockets is read by a schema, never unpickled"
    if inside(module, ("zmq",)) and importer in BY_ENGINES_CHANNELS:
        yield "a module that unpickles has no socket"
    if module == "weightsync" and not inside(importer, ("weightsync.actors", "weightsync.recipes")):
        yield "the library does not import through its own door"
    elif inside(module, ("weightsync",)) and module != "weightsync" and room(module) != room(importer):
        (above, _), (below, _) = room(importer), room(module)
        if below > above:
            yield "this arrow points upwards"
        elif below == above:
            yield "rooms of one floor do not know each other"


def circles(root: Path) -> list[list[str]]:
    """Return cycles of imports, also in functions or for types.

    The public package imports lazily.
    """
    arrows: dict[str, set[str]] = {}
    for item in imports(root):
        if item.importer != "weightsync" and inside(item.module, ("weightsync",)):
            arrows.setdefault(item.importer, set()).add(item.module)
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def wall_clock_reads(root: Path) -> Iterator[str]:
    """Yield ``file:line`` of each use of ``time.time``, ``datetime.now`` and so on."""
    named = {"time": ("time", "time_ns", "localtime", "gmtime"), "datetime": ("now", "utcnow", "today")}
    every_name = {*named["time"], *named["datetime"]}
    text = rf"[.]({'|'.join(every_name)})\b|from time import"
    for folder in (*FOLDERS, "benchmarks"):
        for path in sorted(_files(root / folder)):
            where = path.relative_to(root)
            for node in nodes(path, text):
                if isinstance(node, ast.Attribute) and node.attr in every_name:
                    owner = ast.unparse(node.value).rpartition(".")[2]
                    if node.attr in named.get("datetime" if owner == "date" else owner, ()):
                        yield f"{where}:{node.lineno}"
                elif isinstance(node, ast.ImportFrom) and node.module == "time":
                    taken = {alias.name for alias in node.names} & {*named["time"]}
                    yield from [f"{where}:{node.lineno}"] * bool(taken)


def test_the_wall_clock_is_read_for_stamps_alone() -> None:
    reads = [*wall_clock_reads(ROOT)]
    assert [each for each in reads if each.partition(":")[0] not in WALL_CLOCK] == []
    assert {each.partition(":")[0] for each in reads} == {*WALL_CLOCK}
    assert sum(each.startswith("weightsync/protocol/timing.py") for each in reads) == 1


@pytest.mark.parametrize(
    ("line", "is_caught"),
    [
        ("import time\nbegan = time.time()", True),
        ("from time import time", True),
        ("import datetime\nbegan = datetime.datetime.now()", True),
        ("from datetime import date\nday = date.today()", True),
        ("import time\nnow = time.time_ns", True),
        ("import time\nbegan = time.monotonic(), time.perf_counter()", False),
        ("from datetime import timedelta", False),
    ],
)
def test_a_planted_read_of_the_wall_clock_is_caught(tmp_path: Path, line: str, is_caught: bool) -> None:
    (tmp_path / "weightsync").mkdir()
    (tmp_path / "weightsync/one.py").write_text(line)
    assert bool([*wall_clock_reads(tmp_path)]) == is_caught


def test_nothing_breaks_the_arrows() -> None:
    assert violations(ROOT) == []


@dataclass(frozen=True)
class Copied:
    """A copy of our sources, and its violations."""

    root: Path
    before: list[str]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Copied:
    root = tmp_path_factory.mktemp("copied")
    left_out = shutil.ignore_patterns("__pycache__", *FOLDERS)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=left_out)
    return Copied(root, violations(root))


@pytest.mark.parametrize(
    ("path", "line", "rule"),
    [
        ("weightsync/plan/layout/segment.py", "import torch", "the plan knows numpy"),
        ("weightsync/plan/layout/segment.py", "from weightsync import config", "the plan knows numpy"),
        ("weightsync/plan/layout/segment.py", "from ...memory import SharedBuffer", "the plan knows numpy"),
        ("weightsync/config.py", "def f():\n    import yaml", "pure"),
        ("weightsync/driver/updating/controller.py", "from ray import get", "only the edge knows Ray"),
        (
            "weightsync/driver/updating/controller.py",
            "from weightsync.actors import weight_holder",
            "points upwards",
        ),
        (
            "weightsync/driver/connecting/connect.py",
            "from weightsync.holder import refill",
            "do not know each other",
        ),
        ("weightsync/holder/holder.py", "import weightsync.engines.base", "do not know each other"),
        ("weightsync/engines/base.py", "import weightsync.sources.base", "do not know each other"),
        ("weightsync/sources/base.py", "import weightsync.driver.fleet", "do not know each other"),
        ("weightsync/channel/wire.py", "import weightsync.readers.base", "do not know each other"),
        ("weightsync/protocol/handles.py", "from weightsync.memory import host", "points upwards"),
        ("weightsync/memory/host.py", "import weightsync.channel.wire", "points upwards"),
        ("weightsync/readers/base.py", "import weightsync.testing", "points upwards"),
        ("weightsync/holder/holder.py", "from weightsync import Box", "its own door"),
        ("actors/holders/weight_holder.py", "import weightsync.recipes.config.recipe", "points upwards"),
        ("weightsync/transports/base.py", "import weightsync.engines.base", "points upwards"),
        ("weightsync/engines/base.py", "import vllm.config", "in a function"),
        ("weightsync/holder/holder.py", "import weightsync.plugins.verl", "its framework imports"),
        ("weightsync/plugins/verl.py", "import weightsync.recipes.loops", "do not know each other"),
        ("weightsync/channel/feed.py", "def f():\n    from pickle import loads", "never unpickled"),
        (
            "actors/holders/weight_holder.py",
            "from multiprocessing.connection import Client",
            "never unpickled",
        ),
        ("weightsync/engines/sglang/worker.py", "import zmq", "has no socket"),
        ("weightsync/engines/vllm/adapter.py", "import pickle", None),
        ("actors/holders/weight_holder.py", "import ray", None),
        ("recipes/config/recipe.py", "from weightsync import WeightSync", None),
    ],
)
def test_a_planted_violation_is_caught(copied: Copied, path: str, line: str, rule: str | None) -> None:
    target = copied.root / path
    source = target.read_text()
    target.write_text(f"{source}\n{line}\n")
    caught = [each for each in violations(copied.root) if each not in copied.before]
    target.write_text(source)
    assert any(each.startswith(path) and rule in each for each in caught) if rule else caught == []


def test_no_object_is_received_or_sent_as_a_pickle() -> None:
    """pyzmq can pickle without an import in our code."""
    pickling = {"recv_pyobj", "send_pyobj", "recv_serialized"}
    names = {
        f"{path.relative_to(ROOT)}: {node.attr}"
        for path in source_files(ROOT)
        for node in nodes(path, "|".join(pickling))
        if isinstance(node, ast.Attribute) and node.attr in pickling
    }
    assert names == set()


def test_no_modules_import_one_another() -> None:
    assert circles(ROOT) == []


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    (tmp_path / "weightsync/plan").mkdir(parents=True)
    (tmp_path / "weightsync/plan/one.py").write_text("def f():\n    from weightsync.plan import two\n")
    (tmp_path / "weightsync/plan/two.py").write_text("import numpy\n")
    assert circles(tmp_path) == []
    (tmp_path / "weightsync/plan/two.py").write_text("from weightsync.plan.one import f\n")
    assert {*circles(tmp_path)[0]} == {"weightsync.plan.one", "weightsync.plan.two"}


def test_a_second_home_of_a_heavy_library_is_caught(tmp_path: Path) -> None:
    (tmp_path / "weightsync").mkdir()
    (tmp_path / "weightsync/one.py").write_text("def f():\n    import sglang\ndef g():\n    import sglang\n")
    assert violations(tmp_path) == []
    (tmp_path / "weightsync/two.py").write_text("def f():\n    from sglang import srt\n")
    assert violations(tmp_path) == [
        "sglang is imported in ['weightsync.one', 'weightsync.two']: it has one home"
    ]


@pytest.mark.parametrize(
    ("modules", "kept_out"),
    [
        ("weightsync", ("torch", "ray", "numpy", "numba", "msgspec", "zmq", "transformers")),
        ("weightsync.plan", ("torch", "ray", "numba", "transformers")),
        pytest.param(", ".join(DRIVER), ("torch", "ray", "zmq", "numba", *HEAVY), id="driver"),
        ("weightsync.plugins", ("torch", "ray", "numpy", *HEAVY)),
        ("weightsync.holder.holder", ("ray", *HEAVY)),
        ("weightsync.readers.mooncake_child", ("torch", "ray", "numpy", "msgspec", "zmq", *HEAVY)),
    ],
)
def test_importing_stays_light(modules: str, kept_out: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print(*sorted(set({kept_out!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_door_is_sorted_and_every_name_opens() -> None:
    assert weightsync.__all__ == sorted(weightsync.__all__)
    assert [name for name in weightsync.__all__ if getattr(weightsync, name, None) is None] == []
    assert dir(weightsync) == weightsync.__all__


def test_the_second_door_has_all_that_an_extension_imports() -> None:
    text = (ROOT / "docs/extending.md").read_text()
    assert not {*re.findall(r"from (weightsync[.\w]*) import", text)} - {"weightsync", "weightsync.extend"}
    assert [name for name in weightsync.extend.__all__ if not hasattr(weightsync.extend, name)] == []


def test_no_name_of_the_door_is_a_modules() -> None:
    """Importing such a module would replace the name."""
    modules = {each.name for each in pkgutil.iter_modules(weightsync.__path__)}
    assert not modules & {*weightsync.__all__}


def test_the_door_names_what_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Boxes'"):
        weightsync.Boxes  # noqa: B018


def test_the_root_holds_the_door_and_plain_values_alone() -> None:
    assert len([*(ROOT / "weightsync").glob("*.py")]) <= MOST_IN_ROOT


RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.stem != "chaos")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_the_chaos_that_is_shipped_is_for_the_quickstart() -> None:
    plan = FaultPlan.from_yaml(ROOT / "recipes" / "chaos.yaml")
    plan.check_processes(load_recipe(ROOT / "recipes" / "quickstart.yaml").members)
