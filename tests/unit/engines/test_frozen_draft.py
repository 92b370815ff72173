"""A frozen draft: which tensors are its own, and that each of their bytes is compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from weightsync.engines.drafts.draft_model import DraftModel, own_tensors, shares_weights
from weightsync.engines.drafts.frozen_draft import FrozenDraft

CPU = torch.device("cpu")


class Cache(nn.Module):
    kv_cache_dtype = "auto"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_scale", torch.ones(()))


class Draft(nn.Module):
    """Shares its embedding's module, and its head's memory, with the target."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = target.embed, nn.Linear(4, 6, bias=False)
        self.head.weight = nn.Parameter(target.head.weight.detach())
        self.fc, self.cache = nn.Linear(4, 4), Cache()
        self.packed = nn.Linear(4, 4, bias=False)
        self.packed.weight = nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)


class Packing(DraftModel):
    hidden = torch.ones(4, 4)

    def packed(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "packed", self.hidden
        yield "embed", torch.rand(6, 4)  # the target's: nobody compares it


def target() -> nn.Module:
    model = nn.Module()
    model.embed, model.head, model.rope = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Identity()
    return model


def frozen(kind: type[DraftModel] = DraftModel) -> tuple[Draft, nn.Module, FrozenDraft]:
    serving = target()
    model = Draft(serving)
    return model, serving, FrozenDraft(kind("eagle", "a/draft", model), serving, CPU)


def test_what_a_draft_shares_and_what_no_checkpoint_has_is_not_its_own() -> None:
    model, serving, draft = frozen()
    assert sorted(own_tensors(model, serving)) == ["fc.bias", "fc.weight", "mask"]
    described = draft.describe()
    assert (described.method, described.model) == ("eagle", "a/draft")
    assert (described.num_tensors, described.nbytes, described.num_hidden) == (3, 4 * 20 + 8 * 3, 1)
    assert draft.changed() == []


def test_packed_weights_that_can_be_read_are_compared() -> None:
    _, _, draft = frozen(Packing)
    described = draft.describe()
    assert (described.num_tensors, described.nbytes, described.num_hidden) == (4, 4 * 20 + 8 * 3 + 4 * 16, 0)
    Packing.hidden = torch.zeros(4, 4)
    assert draft.changed() == ["packed, as it is packed"]


@pytest.mark.parametrize("name", ["fc.bias", "fc.weight", "mask"])
@pytest.mark.parametrize("byte", [0, -1])
def test_each_byte_counts(name: str, byte: int) -> None:
    model, serving, draft = frozen()
    own_tensors(model, serving)[name].detach().view(-1).view(torch.uint8)[byte] ^= 1
    assert draft.changed() == [name]
    own_tensors(model, serving)[name].detach().view(-1).view(torch.uint8)[byte] ^= 1
    assert draft.changed() == []


def test_the_targets_weights_may_change_but_have_to_stay_shared() -> None:
    model, serving, draft = frozen()
    with torch.no_grad():
        serving.embed.weight.add_(1)
        serving.head.weight.add_(1)
    model.mask.add_(0)
    model.table.add_(1)
    model.cache.k_scale.add_(1)
    assert draft.changed() == []
    serving.head.weight = nn.Parameter(serving.head.weight.detach().clone())
    assert draft.changed() == ["head.weight"]


def test_equal_drafts_are_described_equally_and_others_are_not() -> None:
    (_, _, one), (other, _, same) = frozen(), frozen()
    assert one.describe() == same.describe()
    other.fc.weight.data[0, 0] += 1
    changed = FrozenDraft(DraftModel("eagle", "a/draft", other), target(), CPU).describe()
    assert changed.digest != one.describe().digest


def test_a_shared_module_without_weights_is_not_a_shared_weight() -> None:
    serving = target()
    assert shares_weights(Draft(serving), serving)
    alone = nn.Sequential(nn.Linear(2, 2), serving.rope)
    assert not shares_weights(alone, serving)
    alone[0].weight = serving.head.weight
    assert shares_weights(alone, serving)
