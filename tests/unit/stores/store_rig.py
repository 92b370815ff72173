"""Checkpoints of a few small tensors, their stores, and crashes in between."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from weightsync.stores.following import Followed, follow
from weightsync.stores.local_folder import LocalFolder
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.publishing import PublishedFolder, publish

FILES = ("model-1.safetensors", "model-2.safetensors")
Tensors = dict[str, np.ndarray]


def tensors(seed: int = 0) -> Tensors:
    draw = np.random.default_rng(seed)
    return {
        "embed": draw.standard_normal((100, 33), np.float32),
        "norm": draw.standard_normal(33, np.float32).astype(np.float16),
        "head": draw.standard_normal((300, 33), np.float32),
    }


def change(held: Tensors, share: float, seed: int) -> None:
    """Change a share of the elements of each tensor."""
    draw = np.random.default_rng(seed)
    for tensor in held.values():
        flat = tensor.reshape(-1)
        flat[draw.random(flat.size) < share] += 1


def save(folder: Path, held: Tensors, step: int = 0, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a checkpoint's folder. A JSON file changes with `step`, another one never does."""
    folder.mkdir(exist_ok=True)
    save_file({name: held[name] for name in ("embed", "norm")}, folder / FILES[0], metadata)
    save_file({"head": held["head"]}, folder / FILES[1])
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(f'{{"step": {step}}}')
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Site:
    """A store with a publisher, and the contents of all versions that it has published."""

    def __init__(self, root: Path, url: str = "") -> None:
        self.root, self.url = root, url or f"file://{root}/store"
        self.store = ObjectStore(self.url, make=True)
        self.copy = LocalFolder(root / "copy")
        self.held = tensors()
        self.contents: dict[int, dict[str, bytes]] = {}

    def copied(self, to: Path) -> Site:
        """Return a copy of everything in a folder, in place of an earlier copy."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.root, to, symlinks=True)
        made = Site(to)
        made.held, made.contents = self.held, {**self.contents}
        return made

    def publish(self, share: float = 0.02, **options: Any) -> PublishedFolder:
        """Change a share of the elements, save and publish."""
        step = len(self.contents) + 1
        change(self.held, share, seed=step)
        return self.publish_again(save(self.root / "files", self.held, step), **options)

    def publish_again(self, files: Path, **options: Any) -> PublishedFolder:
        made = publish(self.store, files, self.copy, **options)
        self.contents[made.version] = content(files)
        return made

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.root / name)

    def follow(self, name: str, version: int | None = None) -> Followed:
        """Follow into the folder of that name, and compare all files."""
        folder = self.folder(name)
        found = follow(self.store, folder, version)
        assert content(folder.current) == self.contents[found.version]
        assert folder.version == found.version
        return found

    def file(self, name: str) -> Path:
        """An object of a folder's store."""
        return self.root / "store" / name


class Crash(BaseException):
    """The process ends here."""


def crashes(targets: Mapping[type, tuple[str, ...]], run: Callable[[], object]) -> Iterator[None]:
    """Run until no call crashes: after the first call of `targets`' methods, then after the second one, …

    Yields after each crash. `run` begins anew each time. It has one thread.
    """
    for limit in itertools.count():
        process = _Process(limit)
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch("weightsync.stores.threads.NUM_THREADS", 1))
            for target, names in targets.items():
                for name in names:
                    crashing = _crashing(getattr(target, name), process)
                    patches.enter_context(mock.patch.object(target, name, crashing))
            with contextlib.suppress(Crash):
                run()
                return
        yield


@dataclass
class _Process:
    """A process that ends after a call, and calls nothing more."""

    calls_left: int

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.calls_left < 0:
            raise Crash
        result = method(*args, **options)
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Crash
        return result


def _crashing(method: Callable[..., Any], process: _Process) -> Callable[..., Any]:
    return lambda *args, **options: process.call(method, *args, **options)
