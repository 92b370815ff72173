"""Names and patterns that choose what travels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync import TrainerShard
from weightsync.errors import ConfigError
from weightsync.plan import RankLayout
from weightsync.sources.module import ModuleSource
from weightsync.sources.selection import Names


class Policy(nn.Module):
    """A model as PEFT and torch.compile wrap it, with a value head and a tied output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([torch.compile(nn.Linear(2, 2))])
        self.lm_head = nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.embed.weight
        self.value_head = nn.Linear(2, 1)


def layout(names: Names | None = None, exclude: tuple[str, ...] = ("value_head.*",)) -> RankLayout:
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": Policy()})})
    return ModuleSource(model, exclude, names=names).layout()


def checkpoint_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace("_orig_mod.", "")


def test_a_function_names_wrapped_modules() -> None:
    found = layout(checkpoint_name)
    assert {meta.name for meta in found.tensors} == {"embed.weight", "layers.0.weight", "layers.0.bias"}
    assert {segment.tensor for segment in found.segments} == {meta.name for meta in found.tensors}
    assert found.tied == (("lm_head.weight", "embed.weight"),)


def test_a_mapping_replaces_the_longest_prefix() -> None:
    prefixes = {"base_model.model.": "", "base_model.model.layers.0._orig_mod.": "layers.0."}
    assert layout(prefixes).tensors == layout(checkpoint_name).tensors


def test_buffers_keep_the_trainers_names_which_errors_use() -> None:
    (embed, *_) = layout(checkpoint_name).segments
    assert embed.buffer == "base_model.model.embed.weight"


@pytest.mark.parametrize(
    ("names", "exclude", "message"),
    [
        ({"base_modle.": ""}, (), r"names: 'base_modle\.' is not valid; did you mean 'base_model"),
        (None, ("value_haed.*",), r"exclude: 'value_haed\.\*' is not valid; .*valid: base_model"),
        (
            checkpoint_name,
            ("base_model.*",),
            r"exclude: 'base_model\.\*' is not valid; .*valid: embed\.weight",
        ),
        (lambda name: "same", (), r"names: .*: 'same' is not valid; .*gets this name, too"),
    ],
)
def test_what_matches_nothing_or_two_is_refused(
    names: Names | None, exclude: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(names, exclude)


def test_a_shard_passes_its_names_on() -> None:
    shard = TrainerShard(names=checkpoint_name, exclude=["value_head.*"])
    shard.model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": Policy()})})
    assert shard.sync_layout().tensors == layout(checkpoint_name).tensors
