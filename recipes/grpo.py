"""Group relative policy optimisation (GRPO), as far as a verifiable reward needs it.

After Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300, section 4.1. Left out is
the KL term to a reference model (beta = 0): there is no pretrained model to stay close to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Batch", "Group", "collate", "group_advantages", "policy_loss", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt, the completions sampled for it, and the reward of each."""

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank trains on; S sequences of at most T tokens.

    Attributes:
        tokens: prompts with their completions, padded at the end; int64 ``[S, T]``.
        mask: 1 where the token was sampled by the policy; float32 ``[S, T - 1]``, shifted by one as
            the log-probabilities are.
        advantages: float32 ``[S]``.
    """

    tokens: Tensor
    mask: Tensor
    advantages: Tensor

    def to(self, device: str) -> Batch:
        return Batch(self.tokens.to(device), self.mask.to(device), self.advantages.to(device))


def group_advantages(rewards: Tensor) -> Tensor:
    """Each reward against its own group: minus the mean, over the standard deviation.

    Args:
        rewards: float ``[num_groups, group_size]``.

    Returns:
        The same shape; zeros for a group whose rewards are all equal.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token given those before it, under the tempered policy.

    Args:
        logits: float ``[S, T, vocab]``.
        tokens: int64 ``[S, T]``.
        temperature: what the sampler used, above 0.

    Returns:
        float ``[S, T - 1]``: entry t belongs to token t + 1.
    """
    logprobs = (logits[:, :-1].float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(2, tokens[:, 1:, None])[..., 0]


def policy_loss(new: Tensor, old: Tensor, batch: Batch, clip: float) -> Tensor:
    """The clipped objective, negated: mean over sequences of the mean over their sampled tokens.

    Args:
        new: log-probabilities under the policy being trained, float ``[S, T - 1]``, with gradient.
        old: the same under the policy that sampled, without gradient.
        batch: its mask and advantages count.
        clip: how far the probability ratio may leave 1 before it stops paying.
    """
    ratio = (new - old).exp()
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    lengths = batch.mask.sum(dim=1).clamp(min=1)
    return -((gain * batch.mask).sum(dim=1) / lengths).mean()


def collate(groups: Sequence[Group], *, pad: int) -> Batch:
    """Groups of equal size as one padded batch.

    Padding at the end needs no attention mask: a causal model never looks to its right.
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
