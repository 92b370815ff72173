"""Safetensors files: what they hold, how they are dealt out, and what is wrong with bad ones."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.models import build_tiny_qwen3
from weightsync.errors import ConfigError, PlanError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box, TensorMeta
from weightsync.plan.layout.balance import Stretch, partition
from weightsync.protocol.messages import combine
from weightsync.sources.checkpoint import checkpoint_store
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore
from weightsync.sources.checkpoint.safetensors_files import contents

ONE, TWO = "model-1.safetensors", "model-2.safetensors"


def held(source: CheckpointStore) -> dict[str, torch.Tensor]:
    """All that it has, by its layout alone."""
    metas = {meta.name: meta for meta in source.tensors}
    found = {name: torch.zeros(m.shape, dtype=getattr(torch, m.dtype)) for name, m in metas.items()}
    for segment in source.layout(0, 1).segments:
        meta = metas[segment.tensor]
        data = source._memory[int(segment.buffer)].tensor[segment.byte_offset :]
        data = data[: segment.box.numel * meta.itemsize].clone().view(getattr(torch, meta.dtype))
        found[segment.tensor][segment.box.slices()] = data.view(segment.box.extent)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"b": torch.arange(6.0).view(2, 3), "c": torch.ones(3, dtype=torch.int64)}, tmp_path / ONE)
    save_file({"a": torch.arange(4, dtype=torch.uint8), "d": torch.ones(1)}, tmp_path / TWO)
    return tmp_path


def tied_folder(folder: Path, head: torch.Tensor, **config: object) -> Path:
    embedding = torch.arange(12.0).view(4, 3)
    save_file({"model.embed_tokens.weight": embedding, "norm": torch.ones(4, 3)}, folder / ONE)
    save_file({"lm_head.weight": head}, folder / TWO)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_a_head_that_repeats_a_tied_embedding_is_an_alias_of_it(
    tmp_path: Path, config: dict[str, object]
) -> None:
    source = CheckpointStore([str(tied_folder(tmp_path, torch.arange(12.0).view(4, 3), **config))])
    layout = source.layout(0, 1)
    assert {meta.name for meta in layout.tensors} == {"model.embed_tokens.weight", "norm"}
    assert layout.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    source.read()
    try:
        wanted = [
            TensorMeta(name, "float32", (4, 3)) for name in ("model.embed_tokens.weight", "lm_head.weight")
        ]
        first, second = source.published(wanted).digests  # of an engine that does not tie them
        assert first == second != 0
    finally:
        source.close()


@pytest.mark.parametrize(
    ("head", "config"),
    [
        (torch.arange(12.0).view(4, 3) + 1, {"tie_word_embeddings": True}),
        (torch.arange(12.0).view(4, 3), {"tie_word_embeddings": False}),
        (torch.arange(12.0).view(4, 3), {}),
        (torch.arange(12.0).view(4, 3).bfloat16(), {"tie_word_embeddings": True}),
    ],
)
def test_other_heads_are_tensors_of_their_own(
    tmp_path: Path, head: torch.Tensor, config: dict[str, object]
) -> None:
    found = contents([str(tied_folder(tmp_path, head, **config))])
    assert "lm_head.weight" in {meta.name for meta in found.tensors}
    assert not found.tied


def test_patterns_leave_tensors_out(folder: Path) -> None:
    assert {meta.name for meta in contents([str(folder)], exclude=["[ab]", "a"]).tensors} == {"c", "d"}


def write_index(folder: Path, weight_map: object) -> str:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return str(path)


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6),
    num_shares=st.integers(1, 4),
    whole=st.booleans(),
)
def test_shares_are_every_byte_once_and_about_equal(
    shapes: list[list[int]], num_shares: int, whole: bool
) -> None:
    scale = 1 if whole else 1 << 20  # bytes of an element: nothing is read here
    stretches = [
        Stretch(str(i), Box((0,) * len(shape), tuple(shape)), scale, i, 7 * i)
        for i, shape in enumerate(shapes)
    ]
    shares = partition(stretches, num_shares)
    for stretch in stretches:
        parts = sorted(
            (part for share in shares for part in share if part.tensor == stretch.tensor),
            key=lambda part: part.start,
        )
        at = stretch.start
        for part in parts:
            assert part.start == at
            assert stretch.box.contains(part.box)
            at += part.nbytes
        assert at == stretch.start + stretch.nbytes
    loads = [sum(part.nbytes for part in share) for share in shares]
    largest = max((stretch.nbytes for stretch in stretches), default=0)
    assert max(loads) - min(loads) <= largest


def test_large_boxes_are_spread_over_all_shares() -> None:
    stretches = [Stretch(name, Box((0, 0), (64, 1 << 16)), 2, 0, 0) for name in "abc"]
    assert [[part.box.extent[0] for part in share] for share in partition(stretches, 4)] == [[16] * 3] * 4


@pytest.mark.parametrize("num_shares", [1, 3])
def test_every_share_together_is_the_checkpoint(folder: Path, num_shares: int) -> None:
    sources = [CheckpointStore([str(folder)], share, num_shares) for share in range(num_shares)]
    for source in sources:
        source.read()
    wanted = {"b": torch.arange(6.0).view(2, 3), "c": torch.ones(3, dtype=torch.int64)}
    wanted |= {"a": torch.arange(4, dtype=torch.uint8), "d": torch.ones(1)}
    found = [held(source) for source in sources]
    for name, tensor in wanted.items():
        assert torch.equal(sum(each[name] for each in found), tensor)
    tensors = (TensorMeta("d", "float32", (1,)), TensorMeta("b", "bfloat16", (2, 3)))
    digests = combine([source.published(tensors).digests for source in sources])
    assert digests.tolist() == [
        tensor_digest(wanted["d"], (1,)),
        tensor_digest(wanted["b"].bfloat16(), (2, 3)),
    ]


def test_a_draft_has_files_of_its_own_whose_names_get_the_prefix(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    save_file({"a": torch.full((3,), 5.0), "t2d": torch.ones(2)}, draft / ONE)
    source = CheckpointStore([str(folder)], exclude=["d", "draft/t2d"], draft=[str(draft)])
    source.read()
    assert [meta.name for meta in source.tensors if meta.name.startswith("draft/")] == ["draft/a"]
    found = held(source)
    assert found.keys() == {"a", "b", "c", "draft/a"}
    assert found["draft/a"].tolist() == [5, 5, 5]
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert source.origin["draft/a"] == str(draft / ONE)
    (digest,) = source.published([TensorMeta("draft/a", "float32", (3,))]).digests
    assert digest == tensor_digest(torch.full((3,), 5.0), (3,))
    with pytest.raises(ConfigError, match="exclude: 'b'"):
        CheckpointStore([str(folder)], exclude=["draft/b"], draft=[str(draft)])


def test_a_draft_may_be_in_the_models_files(folder: Path) -> None:
    source = CheckpointStore([str(folder)])
    source.read()
    digests = source.published([TensorMeta("draft/d", "float32", (1,))]).digests
    assert digests.tolist() == [tensor_digest(torch.ones(1), (1,))]


def test_experts_are_declared_as_models_stack_them(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path, moe=True)
    source = CheckpointStore([str(tmp_path)])
    source.read()
    wanted = model.state_dict()
    assert {meta.name for meta in source.tensors} == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in held(source).items())


def test_bytes_that_no_file_aligns_are_read(tmp_path: Path) -> None:
    path = tmp_path / ONE
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    data = bytes([7]) + np.array([1.5, 2.5], np.float32).tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    source = CheckpointStore([str(path)])
    source.read()
    assert held(source)["b"].tolist() == [1.5, 2.5]


def test_an_index_says_which_files_of_a_folder_count(folder: Path) -> None:
    index = write_index(folder, {"a": TWO, "d": TWO})
    for path in (index, str(folder)):
        assert {meta.name for meta in contents([path]).tensors} == {"a", "d"}
    assert {meta.name for meta in contents([path], exclude=["d"]).tensors} == {"a"}


def cut_short(folder: Path) -> None:
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-1])


def empty_file(folder: Path) -> None:
    (folder / TWO).write_bytes(b"")


def named_twice(folder: Path) -> None:
    save_file({"b": torch.ones(1)}, folder / TWO)


def no_file(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink()


def fifo(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)


def fifo_as_index(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors.index.json")


def device(folder: Path) -> None:
    (folder / TWO).unlink()
    (folder / TWO).symlink_to("/dev/zero")


def socket_file(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mknod(folder / TWO, stat.S_IFSOCK | 0o600)


def folder_in_it(folder: Path) -> None:
    (folder / "sub.safetensors").mkdir()


def long_name(folder: Path) -> None:
    save_file({"n" * 10**5: torch.ones(1)}, folder / TWO)


def four_bits(folder: Path) -> None:
    text = json.dumps({"q": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (folder / TWO).write_bytes(len(text).to_bytes(8, "little") + text + b"0")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (cut_short, ConfigError, rf"{TWO}.*truncated.*download it again"),
        (empty_file, ConfigError, rf"{TWO}.*truncated.*download it again"),
        (named_twice, PlanError, rf"^b: it is in .*{ONE} and in .*{TWO}; give files that are of one"),
        (no_file, ConfigError, "no \\*.safetensors is in this folder"),
        (four_bits, PlanError, rf"^q: dtype F4 in .*{TWO}; .*valid: "),
        (
            lambda f: write_index(f, {"a": "model-3.safetensors"}),
            ConfigError,
            r"names model-3.safetensors for a; there is no model-3.* did you mean 'model-",
        ),
        (lambda f: write_index(f, {"b": TWO}), PlanError, rf"^b: the index names .*{TWO}"),
        (lambda f: write_index(f, ["a"]), ConfigError, "it is no index"),
        (
            lambda f: write_index(f, {"b": 3}),
            ConfigError,
            r"index\.json.*names 3 for b: give the name of a file",
        ),
        (lambda f: write_index(f, {"b": None}), ConfigError, "names None for b"),
        (lambda f: write_index(f, {"b": [ONE]}), ConfigError, "names .*model-1.* for b: give the name"),
        (lambda f: write_index(f, {"b": f"../{f.name}/{ONE}"}), ConfigError, "in the index's folder"),
        (lambda f: write_index(f, {"b": str(f / ONE)}), ConfigError, "in the index's folder"),
        (lambda f: write_index(f, {"b": ""}), ConfigError, "it is a folder: give a file"),
        (lambda f: write_index(f, {"b": "x\0"}), ConfigError, "names x\0 for b; there is no x\0"),
        (lambda f: write_index(f, {"b": "\ud800"}), ConfigError, "for b; there is no"),
        (lambda f: write_index(f, {"b": "x" * 10**5}), ConfigError, r"names x{200}… \(100000 characters\)"),
        (lambda f: write_index(f, {"n" * 10**5: 3}), ConfigError, r"for n{200}… \(100000 characters\)"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[" * 10**5),
            ConfigError,
            "it is no JSON: .*recursion",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("[1]"), ConfigError, "no JSON object"),
        (fifo_as_index, ConfigError, r"index\.json.*it is a FIFO: give a file"),
        (fifo, ConfigError, f"{TWO}.*it is a FIFO: give a file"),
        (device, ConfigError, f"{TWO}.*it is a device: give a file"),
        (socket_file, ConfigError, f"{TWO}.*it cannot be opened: No such device"),
        (folder_in_it, ConfigError, r"sub\.safetensors.*it is a folder: give a file"),
        (
            long_name,
            ConfigError,
            rf"{TWO}.*a tensor n{{200}}… \(100000 characters\): names have at most 1000",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, spoil, error: type, message: str) -> None:
    spoil(folder)
    with pytest.raises(error, match=message) as caught:
        contents([str(folder)])
    assert len(str(caught.value)) < 1500


def test_paths_and_names_that_do_not_exist_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{ONE}'"):
        contents([str(folder / "model1.safetensors")])
    with pytest.raises(ConfigError, match="exclude: 'e' is not valid"):
        contents([str(folder)], exclude=["e"])
    for path in ("x" * 10**5, f"{'x' * 10**5}/{ONE}", "x\0"):
        with pytest.raises(ConfigError, match="there is no") as caught:
            contents([str(folder / path)])
        assert len(str(caught.value)) < 1500
    with pytest.raises(ConfigError, match="truncated, or not a safetensors file"):
        contents([__file__])


def test_reading_gives_way_and_what_comes_after_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()

    def digest(*args: object) -> int:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return tensor_digest(*args)

    monkeypatch.setattr(checkpoint_store, "tensor_digest", digest)
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    source = CheckpointStore([str(folder)])
    source.read()
    assert seen == {checkpoint_store._NICE}
    seen.clear()
    source.published((TensorMeta("b", "bfloat16", (2, 3)),))
    assert seen == {usual}


def test_a_rank_exports_the_files_that_it_sends_from_and_no_others(folder: Path) -> None:
    source = CheckpointStore([str(folder)])
    source.read()
    for rank in range(3):
        export = source.export(rank, 3)
        assert set(export.buffers) == {segment.buffer for segment in export.layout.rank_layout().segments}
