"""Names and patterns that choose what travels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.source_ranks import plan_for, publish
from weightsync import TrainerShard
from weightsync.errors import ConfigError
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Plan, RankLayout
from weightsync.sources.module import ModuleSource
from weightsync.sources.selection import Names, Part


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
        (None, ("value_haed.*",), r"exclude: 'value_haed\.\*' is not valid; did you mean 'value_head\."),
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
    assert shard.sync_layout().rank_layout().tensors == layout(checkpoint_name).tensors


class Experts(nn.Module):
    """Stacks of three matrices for each expert, as torchtitan has them; `down` is transposed here."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.arange(24.0).view(2, 3, 4))
        self.w3 = nn.Parameter(torch.arange(24.0, 48.0).view(2, 3, 4))
        self.down = nn.Parameter(torch.arange(48.0, 72.0).view(2, 3, 4))


def stacked(name: str) -> Part:
    if name == "down":
        return Part("experts.down_proj", (2, 4, 3), order=(0, 2, 1))
    return Part("experts.gate_up_proj", (2, 6, 4), offset=(0, 3 if name == "w3" else 0, 0))


def test_parts_of_a_stack_are_published_as_the_stack() -> None:
    model = Experts()
    source = ModuleSource(model, names=stacked)
    plan = plan_for([source.layout()])
    (data, digests), _ = publish(source, plan, 0)
    found = published(plan, data)
    assert torch.equal(found["experts.gate_up_proj"], torch.cat([model.w1, model.w3], dim=1))
    assert torch.equal(found["experts.down_proj"], model.down.transpose(1, 2))
    assert digests == [tensor_digest(found[meta.name], meta.shape) for meta in plan.tensors]


def published(plan: Plan, data: bytes) -> dict[str, torch.Tensor]:
    send_buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = {meta.name: torch.full(meta.shape, torch.nan) for meta in plan.tensors}
    for piece in plan.trainer_pieces(0):
        cut = send_buffer[piece.send_buffer_offset :][: piece.nbytes]
        target = found[plan.tensors[piece.tensor].name]
        target[piece.box.slices()] = cut.view(target.dtype).view(piece.box.extent)
    return found


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part("stack", (2, 4)), "give shape, offset and order as many"),
        (Part("stack", (2, 6, 4), order=(0, 0, 1)), "give shape, offset and order as many"),
        (Part("stack", (2, 6, 4), offset=(0, 4, 0)), r"its shape \(2, 3, 4\) reaches out"),
        (Part("stack", (2, 3, 4), order=(0, 2, 1)), r"its shape \(2, 3, 4\) reaches out"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(part: Part, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModuleSource(Experts(), names=lambda name: part if name == "w1" else name).layout()
