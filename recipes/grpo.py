"""Group relative policy optimisation (GRPO), for a verifiable reward.

Follows Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300, section 4.1, without the KL
term to a reference model (beta = 0): there is no pretrained model to stay close to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt, the completions sampled for it, and the reward of each."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """The training batch of one rank: S sequences of at most T tokens.

    Attributes:
        tokens: prompts with their completions, padded at the end; int64 ``[S, T]``.
        mask: 1 where the token was sampled by the policy; float32 ``[S, T - 1]``, shifted by one
            like the log-probabilities.
        advantages: float32 ``[S]``.
    """

    tokens: Tensor
    mask: Tensor
    advantages: Tensor

    def to(self, device: str) -> Batch:
        return Batch(self.tokens.to(device), self.mask.to(device), self.advantages.to(device))


def group_advantages(rewards: Tensor) -> Tensor:
    """Normalise each reward in its group: subtract the mean, divide by the standard deviation.

    Args:
        rewards: float ``[num_groups, group_size]``.

    Returns:
        The same shape; zeros for a group whose rewards are all equal.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return each token's log-probability given those before it, under the tempered policy.

    Args:
        logits: float ``[S, T, vocab]``.
        tokens: int64 ``[S, T]``.
        temperature: the sampler's temperature, above 0.

    Returns:
        float ``[S, T - 1]``: entry t belongs to token t + 1.
    """
    logprobs = (logits[:, :-1].float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(2, tokens[:, 1:, None])[..., 0]


def policy_loss(new: Tensor, old: Tensor, batch: Batch, clip: float) -> Tensor:
    """Return the negated clipped objective: mean over sequences of the mean over sampled tokens.

    Args:
        new: log-probabilities under the policy being trained, float ``[S, T - 1]``, with gradient.
        old: the same under the policy that sampled, without gradient.
        batch: its mask and advantages are used.
        clip: how far the probability ratio may leave 1 before it stops paying.
    """
    ratio = (new - old).exp()
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    lengths = batch.mask.sum(dim=1).clamp(min=1)
    return -((gain * batch.mask).sum(dim=1) / lengths).mean()


def distillation_loss(draft: Tensor, target: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return a draft's cross-entropy to what its target would sample, the mean over sampled tokens.

    Args:
        draft, target: logits, float ``[S, T, vocab]``; the draft's with gradient.
        mask: as in `Batch`.
        temperature: the sampler's temperature, above 0.
    """
    wanted = (target[:, :-1].float() / temperature).softmax(dim=-1)
    entropy = -(wanted * (draft[:, :-1].float() / temperature).log_softmax(dim=-1)).sum(dim=-1)
    return (entropy * mask).sum() / mask.sum().clamp(min=1)


def collate(groups: Sequence[Group], *, pad: int) -> Batch:
    """Collate groups of equal size into one padded batch.

    Padding at the end needs no attention mask, as a causal model never looks ahead.
    """
    advantages = group_advantages(torch.tensor([group.rewards for group in groups])).flatten()
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width - 1)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        mask[row, len(prompt) - 1 : end - 1] = 1.0
    return Batch(tokens, mask, advantages)
