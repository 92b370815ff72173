"""Files that change after their headers were read: an error names them, or the bytes are the old ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tests.unit.sources.test_checkpoint_store import held
from tests.unit.sources.test_float8_weights import BLOCKS
from tests.unit.sources.test_float8_weights import save as save_float8
from weightsync.errors import SourceChangedError
from weightsync.plan import TensorMeta
from weightsync.sources.checkpoint import checkpoint_store
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore
from weightsync.sources.checkpoint.stored_files import StoredFile

NAME = "model.safetensors"
Change = Callable[[Path], None]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((16,), value) for i in range(6)}


SAME_SIZE, LONGER = save(tensors(2)), save(tensors(2), {"format": "another header"})


def replace_by(data: bytes, path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


def replace(path: Path) -> None:
    replace_by(SAME_SIZE, path)


def replace_by_longer(path: Path) -> None:
    replace_by(LONGER, path)


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(SAME_SIZE)


def write_with_old_times(path: Path) -> None:
    before = path.stat()
    write(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"0")


def link(path: Path) -> None:
    path.with_name("other").write_bytes(SAME_SIZE)
    path.unlink()
    path.symlink_to("other")


def delete(path: Path) -> None:
    path.unlink()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty_and_write(path: Path) -> None:
    path.write_bytes(SAME_SIZE)


CHANGES = [replace, replace_by_longer, write, write_with_old_times, grow, link, delete, replace_by_fifo]
CUTS = [cut, empty_and_write]
"""A process that has the file mapped, and uses it meanwhile, is ended by the kernel."""


@contextmanager
def at_step(step: int, change: Callable[[], None]) -> Iterator[None]:
    """Make a change before call number `step` of those that look at files or digest what they hold."""
    steps = iter(range(1000))

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            if next(steps) == step:
                change()
            return call(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (os, "open"),
            (os, "fstat"),
            (os, "preadv"),
            (checkpoint_store, "tensor_digest"),
        ):
            patch.setattr(module, name, counted(getattr(module, name)))
        patch.setattr(checkpoint_store, "num_threads", lambda most: 1)
        yield


def check_reading(folder: str, step: int, change: Change) -> None:
    path = Path(folder) / NAME
    save_file(tensors(1), path)
    source = CheckpointStore([folder])
    changed = None
    try:
        with at_step(step, lambda: change(path)):
            source.read()
    except SourceChangedError as error:
        changed = error
    if changed:
        assert (changed.files, NAME in str(changed)) == ((str(path),), True)
    else:
        assert step, "nothing was read before the change"
        wanted = tensors(1)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in held(source).items())
    source.close()


@given(step=st.integers(0, 40), change=st.sampled_from([*CHANGES, *CUTS]))
def test_a_change_at_any_point_of_the_reading_is_an_error_or_comes_too_late(
    step: int, change: Change
) -> None:
    with TemporaryDirectory() as folder:
        check_reading(folder, step, change)


@given(step=st.integers(0, 40), change=st.sampled_from(CHANGES))
def test_a_change_at_any_point_while_files_in_memory_are_digested_is_too(step: int, change: Change) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        check_reading(folder, step, change)


@pytest.mark.parametrize("change", [*CHANGES, *CUTS])
@pytest.mark.parametrize("parent", [None, "/dev/shm"])
def test_a_change_between_header_and_reading_is_an_error(parent: str | None, change: Change) -> None:
    with TemporaryDirectory(dir=parent) as folder:
        check_reading(folder, 0, change)


def test_float8_weights_and_scales_are_of_the_files_that_were_checked(tmp_path: Path) -> None:
    stored, _ = save_float8(tmp_path, BLOCKS)
    source = CheckpointStore([str(tmp_path)])
    replace_by(
        save({name: stored[name] for name in [*stored][1::2]}, {"a": "b"}), tmp_path / "model-2.safetensors"
    )
    with pytest.raises(SourceChangedError, match=r"model-2\.safetensors changed"):
        source.read()


def test_a_file_that_changes_while_its_header_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / NAME
    save_file(tensors(1), path)
    with at_step(3, lambda: replace_by_longer(path)), pytest.raises(SourceChangedError, match=NAME):
        CheckpointStore([str(path)])


def test_the_next_write_to_a_file_that_is_checked_gets_a_later_time(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"0")
    checked = StoredFile.check(path)
    assert time.time_ns() >= checked.changed_ns + 10_000_000


@pytest.fixture
def mapped() -> Iterator[tuple[Path, CheckpointStore]]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / NAME
        save_file(tensors(1), path)
        source = CheckpointStore([folder])
        assert source.read().mapped_nbytes
        yield path, source
        source.close()


@pytest.mark.parametrize("change", [write, grow, *CUTS])
def test_a_write_to_a_file_in_memory_is_an_error_before_bytes_move(
    mapped: tuple[Path, CheckpointStore], change: Change
) -> None:
    path, source = mapped
    source.require_unwritten()
    change(path)
    with pytest.raises(SourceChangedError, match=NAME):
        source.require_unwritten()


@pytest.mark.parametrize("change", [replace, replace_by_longer, link, delete])
def test_a_file_in_memory_that_is_replaced_is_served_as_it_was(
    mapped: tuple[Path, CheckpointStore], change: Change
) -> None:
    path, source = mapped
    change(path)
    source.require_unwritten()
    assert torch.equal(held(source)["t3"], tensors(1)["t3"])
    source.published([TensorMeta("t3", "bfloat16", (16,))])


def test_a_file_in_memory_is_digested_again_before_its_values_are_cast(
    mapped: tuple[Path, CheckpointStore],
) -> None:
    path, source = mapped
    np.memmap(path, np.uint8, "r+")[-1] ^= 1  # writes to mappings change no time
    source.require_unwritten()
    for _ in range(2):
        with pytest.raises(SourceChangedError, match=NAME):
            source.published([TensorMeta(name, "bfloat16", (16,)) for name in tensors(1)])
