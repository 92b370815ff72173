from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from weightsync.recipes.training.grpo import (
    Batch,
    PromptGroup,
    collate,
    distillation_loss,
    group_advantages,
    mismatch,
    policy_loss,
    token_logprobs,
)

rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16)


@given(rewards)
def test_advantages_of_a_group_are_centred_and_keep_its_order(values: list[float]) -> None:
    (advantages,) = group_advantages(torch.tensor([values]))
    assert abs(advantages.sum().item()) < 1e-3
    for mine, advantage in zip(values, advantages.tolist(), strict=True):
        if len(set(values)) == 1:
            assert advantage == 0
        else:
            assert (advantage > 0) == (mine == 1.0)


def test_advantages_do_not_mix_groups() -> None:
    both = group_advantages(torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]))
    assert_close(both[0], group_advantages(torch.tensor([[0.0, 1.0, 0.0]]))[0])
    assert_close(both[1], group_advantages(torch.tensor([[1.0, 1.0, 0.0]]))[0])


def test_logprobs_belong_to_the_next_token() -> None:
    logits = torch.tensor([[[0.0, 2.0], [2.0, 0.0], [9.0, 9.0]]])
    found = token_logprobs(logits, torch.tensor([[0, 1, 0]]))
    assert_close(found, torch.log_softmax(torch.tensor([[2.0, 0.0]]), dim=1)[:, 0].expand(1, 2))


def test_collate_masks_exactly_the_sampled_tokens() -> None:
    groups = [PromptGroup([5, 6], [[7], [8, 9]], [1.0, 0.0]), PromptGroup([4], [[3, 2, 1], [3]], [0.0, 1.0])]
    batch = collate(groups, pad=0)
    assert batch.tokens.tolist() == [[5, 6, 7, 0], [5, 6, 8, 9], [4, 3, 2, 1], [4, 3, 0, 0]]
    sampled = [row[1:][keep.bool()].tolist() for row, keep in zip(batch.tokens, batch.mask, strict=True)]
    assert sampled == [[7], [8, 9], [3, 2, 1], [3]]
    assert batch.advantages.sign().tolist() == [1, -1, -1, 1]


def test_an_engines_logprobs_are_at_sampled_tokens_and_compared_there_alone() -> None:
    groups = [PromptGroup([5, 6], [[7], [8, 9]], [1.0, 0.0], [[-1.0], [-2.0, -3.0]])]
    batch = collate(groups, pad=0)
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [[0, -1, 0], [0, -2, -3]]
    trainer = batch.logprobs + torch.tensor([[9.0, 0.3, 9.0], [9.0, 0.0, -0.6]])
    found = mismatch(trainer, batch)
    assert found["mismatch"] == pytest.approx(0.3)
    assert found["mismatch_kl"] == pytest.approx((math.exp(0.3) - 1.3 + math.exp(-0.6) - 0.4) / 3)
    assert mismatch(batch.logprobs, batch) == {"mismatch": 0, "mismatch_kl": 0}
    assert mismatch(trainer, collate([PromptGroup([5], [[7], [8]], [1.0, 0.0])], pad=0)) == {}


def one_token(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and gradient at one sampled token, whose probability changed by `ratio`."""
    new = torch.tensor([[ratio]]).log().requires_grad_()
    batch = Batch(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 1), torch.tensor([advantage]))
    loss = policy_loss(new, torch.zeros(1, 1), batch, clip=0.2)
    torch.autograd.backward(loss)
    assert new.grad is not None
    return loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.4, False),  # gained enough: clipped
        (0.5, 2.0, -1.0, True),  # lost what pays: must be able to come back
        (0.5, -2.0, 1.6, False),  # avoided enough: clipped
        (1.5, -2.0, 3.0, True),  # does more of what costs: must be able to come back
    ],
)
def test_the_loss_is_clipped_only_where_that_hurts(
    ratio: float, advantage: float, loss: float, moves: bool
) -> None:
    found, gradient = one_token(ratio, advantage)
    assert found == pytest.approx(loss, rel=1e-5)
    assert (gradient != 0) == moves


def test_long_completions_weigh_as_much_as_short_ones() -> None:
    batch = collate([PromptGroup([1], [[2, 2, 2, 2], [3]], [1.0, 0.0])], pad=0)
    new = torch.zeros_like(batch.mask, requires_grad=True)
    torch.autograd.backward(policy_loss(new, torch.zeros_like(batch.mask), batch, clip=0.2))
    assert new.grad is not None
    long, short = new.grad.sum(dim=1).tolist()
    assert long == pytest.approx(-short)
    assert new.grad[batch.mask == 0].eq(0).all()


def test_a_draft_is_drawn_to_what_its_target_samples_at_sampled_tokens_alone() -> None:
    target, draft = torch.randn(2, 4, 5), torch.zeros(2, 4, 5, requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    loss = distillation_loss(draft, target, mask, temperature=0.5)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(math.log(5))
    assert draft.grad is not None
    downhill = (target / 0.5).softmax(-1) - 0.2  # what softmax's gradient is at equal logits
    assert torch.allclose(draft.grad[:, :-1], -2 * downhill[:, :-1] * mask[..., None] / 3, atol=1e-6)
    assert not draft.grad[:, -1].any()
    best = distillation_loss(target, target, mask, temperature=0.5)
    assert best < distillation_loss(target + torch.randn(2, 4, 5), target, mask, temperature=0.5)
