"""A model and a draft as one source: names, settings, what they share, and what moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from weightsync import Part, TrainerShard
from weightsync.errors import ConfigError, StateError
from weightsync.plan import RankLayout, Stage
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.sources import make_components
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import ModuleSource


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)


class Draft(nn.Module):
    """A draft as a trainer of EAGLE has it: its embedding is the target's module."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed, self.fc = target.embed, nn.Linear(8, 4)


class Trainer(TrainerShard):
    def __init__(self, model: Any = None, draft: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        if model is not None:
            self.model = model
        self.draft = draft

    @property
    def declared(self) -> RankLayout:
        return self.sync_layout().rank_layout()

    @property
    def names(self) -> list[str]:
        return [meta.name for meta in self.declared.tensors]


def test_the_drafts_names_have_a_prefix_and_what_it_shares_is_tied() -> None:
    target = Target()
    layout = Trainer(target, Draft(target)).declared
    assert [meta.name for meta in layout.tensors] == [
        "embed.weight",
        "head.weight",
        "draft/fc.weight",
        "draft/fc.bias",
    ]
    assert [each.tensor for each in layout.segments] == [meta.name for meta in layout.tensors]
    assert layout.tied == (("draft/embed.weight", "embed.weight"),)


def test_a_copy_of_the_models_tensor_is_the_drafts_own() -> None:
    assert "draft/embed.weight" in Trainer(Target(), Draft(Target())).names


def test_what_the_draft_ties_within_itself_is_tied_to_the_model_if_that_has_it() -> None:
    target = Target()
    draft = Draft(target)
    draft.first, draft.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    draft.second.weight = draft.first.weight
    draft.head = nn.Linear(4, 6, bias=False)
    draft.head.weight = target.embed.weight
    assert sorted(Trainer(target, draft).declared.tied) == [
        ("draft/embed.weight", "embed.weight"),
        ("draft/head.weight", "embed.weight"),
        ("draft/second.weight", "draft/first.weight"),
    ]


def test_a_rank_may_hold_the_draft_alone() -> None:
    assert Trainer(draft=nn.Linear(2, 3)).names == ["draft/weight", "draft/bias"]
    with pytest.raises(StateError, match=r"has to set self\.model or self\.source"):
        Trainer().sync_layout()


def test_settings_that_begin_with_the_prefix_are_the_drafts() -> None:
    trainer = Trainer(
        Target(),
        Draft(Target()),
        exclude=["head.*", "draft/embed.*"],
        names={"embed.": "model.embed.", "draft/fc.": "draft/model.fc."},
        frozen=["model.*", "draft/*.bias"],
    )
    assert trainer.names == ["model.embed.weight", "draft/model.fc.weight", "draft/model.fc.bias"]
    assert trainer.declared.frozen == ("model.embed.weight", "draft/model.fc.bias")


def test_a_function_gets_the_names_of_both() -> None:
    def name(given: str) -> str | Part:
        return given.replace("weight", "w")

    assert Trainer(nn.Linear(2, 2), nn.Linear(3, 3), names=name).names == [
        "w",
        "bias",
        "draft/w",
        "draft/bias",
    ]
    astray = Trainer(nn.Linear(2, 2), nn.Linear(3, 3), names=lambda given: given.removeprefix("draft/") + "_")
    with pytest.raises(ConfigError, match=r"names: 'weight_' .*have it begin with draft/"):
        astray.sync_layout()


@pytest.mark.parametrize("setting", ["exclude", "frozen"])
def test_a_setting_that_fits_nothing_of_the_draft_is_refused_as_it_was_given(setting: str) -> None:
    trainer = Trainer(Target(), Draft(Target()), **{setting: ["draft/embd.*"]})
    with pytest.raises(
        ConfigError, match=rf"{setting}: 'draft/embd\.\*' .*did you mean 'draft/embed\.weight'"
    ):
        trainer.sync_layout()


def test_a_source_of_ones_own_decides_about_drafts() -> None:
    trainer = Trainer(draft=nn.Linear(2, 2))
    trainer.source = ModuleSource(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"self\.draft: .*self\.source decides"):
        trainer.sync_layout()


def test_a_draft_that_is_added_or_taken_away_makes_another_source() -> None:
    trainer = Trainer(nn.Linear(2, 2))
    assert trainer.names == ["weight", "bias"]
    trainer.draft = nn.LayerNorm(3)
    assert trainer.names == ["weight", "bias", "draft/weight", "draft/bias"]
    trainer.draft = None
    assert trainer.names == ["weight", "bias"]


def source(*models: Any) -> Any:
    made = make_components(models)
    made.layout()
    return made


def test_what_moved_is_named_in_either() -> None:
    target, draft = nn.Linear(2, 2), nn.Linear(3, 3)
    weights = {**dict(target.named_parameters()), **{f"draft/{n}": p for n, p in draft.named_parameters()}}
    guard = source(target, draft)._watch(LocalWeights(RankLayout((), ()), weights))
    assert guard.as_before((target, draft))
    assert not guard.as_before((target, nn.Linear(3, 3)))
    assert not guard.as_before((None, draft))
    draft.bias = nn.Parameter(torch.zeros(3))
    assert not guard.as_before((target, draft))
    weights["draft/bias"] = draft.bias
    assert guard.moved(weights) == ["draft/bias"]
    target.weight = nn.Parameter(torch.zeros(2, 2))
    weights["weight"] = target.weight
    assert guard.moved(weights) == ["weight", "draft/bias"]


class Staged(ModuleSource):
    """The second stage of a pipeline."""

    def _weights(self) -> LocalWeights:
        weights = super()._weights()
        return LocalWeights(
            RankLayout(weights.layout.tensors, weights.layout.segments, stage=Stage(2, ("embed.weight",))),
            weights.tensors,
        )


def test_each_stage_of_a_pipeline_may_hold_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources(), f"{__name__}.Target", f"{__name__}:Staged")
    stage = Trainer(Target(), nn.Linear(2, 2)).declared.stage
    assert stage
    assert (stage.number, stage.shared) == (2, ("embed.weight", "draft/weight", "draft/bias"))
    monkeypatch.setitem(sources(), f"{__name__}.Draft", f"{__name__}:Staged")
    stage = Trainer(draft=Draft(Target())).declared.stage
    assert stage
    assert (stage.number, stage.shared) == (2, ("draft/embed.weight",))


def sources() -> dict[str, str]:
    from weightsync.sources import SOURCES

    return SOURCES


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[Any]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_meshes_of_both_follow_one_another(one_rank: Any) -> None:
    def sharded(module: nn.Module) -> nn.Module:
        def cut(_: str, each: nn.Module, mesh: Any) -> None:
            for name, tensor in [*each.named_parameters(recurse=False)]:
                each.register_parameter(name, nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])))

        return distribute_module(module, one_rank, cut)

    for target, draft, sizes in (
        (sharded(nn.Linear(2, 2)), sharded(nn.Linear(4, 3)), (1, 1)),
        (nn.Linear(2, 2), sharded(nn.Linear(4, 3)), (1,)),
        (sharded(nn.Linear(2, 2)), nn.Linear(4, 3), (1,)),
    ):
        layout = source(target, draft).layout()
        assert layout.mesh
        assert layout.mesh.sizes == sizes
        assert layout.mesh.cuts.keys() == {"weight", "bias", "draft/weight", "draft/bias"}
        assert LayoutTable.of(layout).mesh, "the segments follow from it"
        assert LayoutTable.of(layout).rank_layout().segments == layout.segments
