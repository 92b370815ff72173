"""Tests use public names.

Only the unit test of a module uses its private names.

That test is in ``tests/unit`` or ``tests/integration`` and named after the module:
``test_nccl_endings.py`` tests ``transports/nccl.py``. A class may use what it inherits.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("weightsync", "actors", "recipes", "benchmarks", "tests")
THIRD_PARTY = {
    "_StridedShard": "torch",
    "_checkpoint": "torch",
    "_compute_local_shape_and_global_offset": "torch",
    "_current_frames": "sys",
    "_dynamo": "torch",
    "_exit": "os",
    "_get_original_loader": "vllm",
    "_internal": "torch",
    "_k_scale_float": "vllm",
    "_keep_in_fp32_modules": "transformers",
    "_register_backend": "torch",
    "_registry": "vllm",
    "_local_tensor": "torch",
    "_modules": "torch",
    "_non_persistent_buffers_set": "torch",
    "_replace": "named tuples",
    "_run_in_subprocess": "vllm",
    "_utils": "torch",
}
"""Private names of other packages, which have no public ones for the same."""
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "patch", "object", "attrgetter", "methodcaller")
"""Functions that take the name of an attribute, or a dotted path to it."""
_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
"""Most nodes of a tree: they access nothing."""


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each access to another object's or module's private name."""
    return _visit(ast.parse(source), frozenset(), in_class=False)


def _visit(node: ast.AST, own: frozenset[str], *, in_class: bool) -> Iterator[tuple[int, str]]:
    """Visit `node`. `own` has the names of the enclosing method's own object."""
    yield from ((node.lineno, name) for name in _named(node, own) if is_private(name))  # type: ignore[attr-defined]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        own = own - {*names}
        if in_class and not isinstance(node, ast.Lambda):
            own |= {*names[:1]}
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _LEAVES):
            yield from _visit(child, own, in_class=isinstance(node, ast.ClassDef))


def _named(node: ast.AST, own: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr] if is_private(node.attr) and not _is_own(node.value, own) else []
    if isinstance(node, ast.ImportFrom):
        # Python's own modules, such as `_socket`, have such names.
        module = "" if node.module in sys.stdlib_module_names else node.module or ""
        return [*module.split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.Call):
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in BY_NAME and not (node.args and _is_own(node.args[0], own)):
            return [part for each in node.args for part in _text(each).split(".")]
    if isinstance(node, ast.Subscript) and is_private(_text(node.slice)):
        holder = ast.unparse(node.value)
        return [_text(node.slice)] if holder.endswith(".__dict__") or holder.startswith("vars(") else []
    return []


def _is_own(node: ast.expr, own: frozenset[str]) -> bool:
    return ast.unparse(node) in own | {"super()"}


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def defined(path: Path) -> set[str]:
    """Return the private names that a module, its classes and their objects define."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {*filter(is_private, names)}


@cache
def modules(root: Path) -> list[Path]:
    paths = [path for package in OURS for path in (root / package).rglob("*.py")]
    return [path for path in paths if not path.name.startswith("test_")]


def owned(test: Path, root: Path) -> set[str]:
    """Return the private names of the modules that a file tests."""
    if test.relative_to(root).parts[:2] not in {("tests", "unit"), ("tests", "integration")}:
        return set()
    tested = f"_{test.stem}_"
    return {name for path in modules(root) if f"_{path.stem}_" in tested for name in defined(path)}


def violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line}: {name}"
        for path in sorted((root / "tests").rglob("*.py"))
        for line, name in private_names(path.read_text())
        if name not in THIRD_PARTY and name not in owned(path, root)
    ]


def test_tests_use_no_private_names() -> None:
    assert violations(ROOT) == []


def test_what_is_said_to_be_of_others_is_not_ours() -> None:
    with_some = [path for path in modules(ROOT) if any(name in path.read_text() for name in THIRD_PARTY)]
    assert not {name for path in with_some for name in defined(path)} & {*THIRD_PARTY}


@pytest.mark.parametrize(
    ("planted", "names"),
    [
        ("sync._members", ["_members"]),
        ("sync._members._holders = {}", ["_members", "_holders"]),
        ("sync.__private", ["__private"]),
        ("from weightsync.config import _field", ["_field"]),
        ("from weightsync._secret import open", ["_secret"]),
        ("import weightsync._secret", ["_secret"]),
        ("getattr(sync, '_loop')", ["_loop"]),
        ("monkeypatch.setattr(sync, '_loop', None)", ["_loop"]),
        ("monkeypatch.setattr('weightsync.config._field', None)", ["_field"]),
        ("mock.patch.object(sync, '_loop')", ["_loop"]),
        ("vars(sync)['_loop']", ["_loop"]),
        ("sync.__dict__['_loop']", ["_loop"]),
        ("actor.__ray_call__.remote(lambda self: self._engine)", ["_engine"]),
        ("def of(self):\n    return self._engine", ["_engine"]),
        ("class A:\n    def f(self, other):\n        return other._x", ["_x"]),
        ("class A:\n    def f(self):\n        return [super()._x, self._x, lambda: self._x]", []),
        ("class A:\n    @classmethod\n    def f(cls):\n        return cls._x", []),
        ("sync.version, sync.__class__, _local", []),
        ("getattr(sync, 'version')", []),
    ],
)
def test_a_planted_access_is_found(planted: str, names: list[str]) -> None:
    assert sorted(name for _, name in private_names(planted)) == sorted(names)


@pytest.mark.parametrize(
    ("test", "is_found"),
    [
        ("tests/unit/test_config.py", False),
        ("tests/unit/recipes/test_config_files.py", False),
        ("tests/integration/test_config.py", False),
        ("tests/unit/test_configuration.py", True),
        ("tests/actors/test_config.py", True),
    ],
)
def test_the_unit_test_of_a_module_may_name_what_the_module_defines(
    tmp_path: Path, test: str, is_found: bool
) -> None:
    for name, text in {"weightsync/config.py": "_field = 1", test: "config._field, config._other"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    wanted = [f"{test}:1: _field"] * is_found + [f"{test}:1: _other"]
    assert sorted(violations(tmp_path)) == wanted
