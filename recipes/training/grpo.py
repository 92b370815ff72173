"""Group relative policy optimisation (GRPO), for a verifiable reward.

Follows Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300, section 4.1, without the KL
term to a reference model (beta = 0): there is no pretrained model to stay close to. The policy that sampled
is the engine: its own log-probabilities are the denominator of each ratio. Like those, all log-probabilities
are the model's own, before temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt, the completions sampled for it, and the reward of each.

    `logprobs`: the engine's log-probability of each token. Without them, the trainer's first
    ones are used.
    """

    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    logprobs: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The training batch of one rank: S sequences of at most T tokens.

    Attributes:
        tokens: prompts with their completions, padded at the end; int64 ``[S, T]``.
        mask: 1 where the token was sampled by the policy; float32 ``[S, T - 1]``, shifted by one
            like the log-probabilities.
        advantages: float32 ``[S]``.
        logprobs: the engine's log-probabilities, 0 where nothing was sampled; float32 ``[S, T - 1]``.
    """

    tokens: Tensor
    mask: Tensor
    advantages: Tensor
    logprobs: Tensor | None = None

    def to(self, device: str) -> Batch:
        logprobs = None if self.logprobs is None else self.logprobs.to(device)
        return Batch(self.tokens.to(device), self.mask.to(device), self.advantages.to(device), logprobs)


def group_advantages(rewards: Tensor) -> Tensor:
    """Normalise rewards by group: subtract the mean, divide by the standard deviation.

    Args:
        rewards: float ``[num_groups, group_size]``.

    Returns:
        The same shape; zeros for a group whose rewards are all equal.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return each token's log-probability, given the tokens before.

    Args:
        logits: float ``[S, T, vocab]``.
        tokens: int64 ``[S, T]``.

    Returns:
        float ``[S, T - 1]``: entry t belongs to token t + 1.
    """
    logprobs = logits[:, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(2, tokens[:, 1:, None])[..., 0]


def policy_loss(new: Tensor, old: Tensor, batch: Batch, clip: float) -> Tensor:
    """Return the negated clipped objective: mean over sequences of the mean over sampled tokens.

    Args:
        new: log-probabilities under the policy being trained, float ``[S, T - 1]``, with gradient.
        old: the same under the policy that sampled, without gradient.
        batch: only mask and advantages are used.
        clip: how far the probability ratio may leave 1 before it stops paying.
    """
    ratio = (new - old).exp()
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    lengths = batch.mask.sum(dim=1).clamp(min=1)
    return -((gain * batch.mask).sum(dim=1) / lengths).mean()


def mismatch(trainer: Tensor, batch: Batch) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's, over sampled tokens.

    ``mismatch`` is the mean absolute difference. ``mismatch_kl`` is the mean of ``r - 1 - log r`` for
    ``r = exp(trainer - engine)``, an estimate of the KL divergence that is never negative (k3 in
    http://joschu.net/blog/kl-approx.html). Empty if the batch has no log-probabilities of an engine.
    """
    if batch.logprobs is None:
        return {}
    log_ratio = (trainer - batch.logprobs)[batch.mask.bool()].double()
    kl = log_ratio.expm1() - log_ratio
    return {"mismatch": log_ratio.abs().mean().item(), "mismatch_kl": kl.mean().item()}


def distillation_loss(draft: Tensor, target: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return a draft's cross-entropy to the target's distribution, the mean over sampled tokens.

    Args:
        draft, target: logits, float ``[S, T, vocab]``; the draft's with gradient.
        mask: as in `Batch`.
        temperature: the sampler's temperature, above 0.
    """
    wanted = (target[:, :-1].float() / temperature).softmax(dim=-1)
    entropy = -(wanted * (draft[:, :-1].float() / temperature).log_softmax(dim=-1)).sum(dim=-1)
    return (entropy * mask).sum() / mask.sum().clamp(min=1)


def collate(groups: Sequence[PromptGroup], *, pad: int) -> Batch:
    """Collate groups of equal size into one padded batch.

    Padding at the end needs no attention mask, as a causal model never looks ahead.
    """
    advantages = group_advantages(torch.tensor([group.rewards for group in groups])).flatten()
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width - 1)
    given = [row for group in groups for row in group.logprobs or ()]
    logprobs = torch.zeros_like(mask) if given else None
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        mask[row, len(prompt) - 1 : end - 1] = 1.0
        if logprobs is not None:
            logprobs[row, len(prompt) - 1 : end - 1] = torch.tensor(given[row])
    return Batch(tokens, mask, advantages, logprobs)
