"""A draft and its target as one: a layout that proves both, and a loader of both."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.fleets.speculating import WIDTH, Copying, FusedDraft, SpeculatingHost
from weightsync.engines.drafts.trained_draft import TrainedDraft
from weightsync.engines.loading.loader_trace import UnprovableError, trace
from weightsync.memory.tensors import segment_view
from weightsync.plan import TensorMeta


@pytest.fixture
def host() -> SpeculatingHost:
    return SpeculatingHost()


@pytest.fixture
def trained(host: SpeculatingHost) -> TrainedDraft:
    return TrainedDraft(FusedDraft("fused", "a/draft", host.drafting), host.target)


def test_both_are_one_checkpoint_in_which_what_is_shared_is_tied(
    host: SpeculatingHost, trained: TrainedDraft
) -> None:
    joined = trained.join(host.checkpoint())
    assert [meta.name for meta in joined.tensors] == [name for name, _ in host.live()]
    assert joined.tied == (("draft/embed.weight", "embed.weight"),)


def test_what_is_shared_with_a_tied_tensor_is_tied_to_its_first_name(trained: TrainedDraft) -> None:
    class Headed(SpeculatingHost):
        def checkpoint(self):
            found = super().checkpoint()
            metas = tuple(each for each in found.tensors if each.name != "embed.weight")
            return type(found)(metas, (("embed.weight", "up.weight"),), found.linears)

    assert trained.join(Headed().checkpoint()).tied[1:] == (("draft/embed.weight", "up.weight"),)


def test_element_ids_prove_both_loaders_and_each_byte_of_both(
    host: SpeculatingHost, trained: TrainedDraft
) -> None:
    joined = trained.join(host.checkpoint())
    load = partial(trained.load_weights, host.load_weights)
    traced = trace(trained.modules, joined.tensors, joined.tied, load=load)
    assert traced.live.keys() == {
        "embed.weight",
        "updown.weight",
        "draft/qk.weight",
        "draft/norm.weight",
        "draft/norm.bias",
    }
    held = dict(host.live())
    with torch.no_grad():
        for number, segment in enumerate(traced.layout.segments):
            segment_view(traced.live[segment.buffer], segment).fill_(number)
            assert (held[segment.tensor] == number).all(), segment.tensor


def test_a_draft_whose_loader_writes_the_target_is_not_written_in_place(
    host: SpeculatingHost, trained: TrainedDraft
) -> None:
    joined = trained.join(host.checkpoint())
    both = [*joined.tensors, TensorMeta("draft/embed.weight", "float32", (6, WIDTH))]
    with pytest.raises(UnprovableError, match=r"embed\.weight: .*several segments write"):
        trace(trained.modules, both, (), load=partial(trained.load_weights, host.load_weights))


def weights(host: SpeculatingHost) -> list[tuple[str, torch.Tensor]]:
    """New weights of both, the draft's first, which no plan would send."""
    made = [(name, torch.randn(each.shape)) for name, each in host.live()]
    return [*made[3:], *made[:3]]


def loader_of_both(
    host: SpeculatingHost, trained: TrainedDraft, events: list[str], fails: str = ""
) -> Copying:
    class Failing(Copying):
        def finish(self) -> None:
            super().finish()
            if self._name == fails:
                raise RuntimeError(f"the {fails} is not whole")

    class Noting(FusedDraft):
        def loader(self) -> Copying:
            return Failing(self.model, events)

    both = TrainedDraft(Noting("fused", "a/draft", host.drafting), host.target)
    return both.loader(Failing(host.target, events))


def test_the_draft_is_loaded_once_the_target_is_live(host: SpeculatingHost, trained: TrainedDraft) -> None:
    events: list[str] = []
    loader, given = loader_of_both(host, trained, events), weights(host)
    loader.load(given[:5])
    loader.load(given[5:])
    loader.finish()
    assert events == ["target begins", "target finishes", "draft begins", "draft finishes"]
    live = dict(host.live())
    assert all(torch.equal(live[name], tensor) for name, tensor in given)


@pytest.mark.parametrize("fails", ["target", "draft"])
def test_the_load_that_failed_is_abandoned(host: SpeculatingHost, trained: TrainedDraft, fails: str) -> None:
    events: list[str] = []
    loader = loader_of_both(host, trained, events, fails)
    loader.load(weights(host))
    with pytest.raises(RuntimeError, match=f"the {fails} is not whole"):
        loader.finish()
    loader.abandon()
    assert events[-2:] == [f"{fails} finishes", f"{fails} is abandoned"]
