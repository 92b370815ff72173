"""Trains a mixture-of-experts layer on two ranks, with weightsync.experts and with torch's all-to-all.

torchrun --nproc-per-node 2 examples/two_rank_experts.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all

from weightsync import experts

RANKS, LOCAL, TOP_K, HIDDEN, TOKENS = 2, 4, 2, 32, 64  # LOCAL experts on each rank
SIZES = (RANKS * LOCAL, TOP_K, HIDDEN, TOKENS)


def run_experts(rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    parts = rows.tensor_split(counts.cumsum(0).cpu())  # by expert; the last part has rows without a token
    return torch.cat([*map(torch.relu, map(torch.matmul, parts, weights)), parts[LOCAL]])


def torch_layer(x: Tensor, ids: Tensor, gates: Tensor, weights: Tensor, world: dist.ProcessGroup) -> Tensor:
    chosen, order = ids.flatten().sort(stable=True)
    num_sent = (chosen // LOCAL).bincount(minlength=RANKS)
    sent, received = num_sent.tolist(), all_to_all(num_sent, [1] * RANKS, [1] * RANKS, world).tolist()
    expert = all_to_all(chosen, received, sent, world) % LOCAL
    by_expert = expert.argsort(stable=True)
    rows = all_to_all(x[order // TOP_K], received, sent, world)[by_expert]
    done = run_experts(rows, expert.bincount(minlength=LOCAL), weights)[by_expert.argsort()]
    back = all_to_all(done, sent, received, world)[order.argsort()]
    return (back.view(TOKENS, TOP_K, HIDDEN) * gates[..., None]).sum(1)


def train(world: dist.ProcessGroup, ours: bool, num_steps: int = 200) -> list[float]:
    torch.manual_seed(world.rank())
    x, wanted = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
    group = experts.ExpertGroup(experts.SharedMemoryMover(world), *SIZES, dtype=x.dtype)
    router = torch.eye(HIDDEN, RANKS * LOCAL, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(LOCAL, HIDDEN, HIDDEN, dtype=torch.float64, requires_grad=True)
    optimizer, losses = torch.optim.Adam([router, weights], lr=1e-2), list[float]()
    for _ in range(num_steps):
        gates, ids = (x @ router).softmax(1).topk(TOP_K)
        if ours:
            rows, counts, handle = group.dispatch(x, ids, gates)
            out = group.combine(run_experts(rows, counts, weights), handle)
        else:
            out = torch_layer(x, ids, gates, weights, world)
        loss = (out - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(router.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for ours in (True, False):
        print(f"{'weightsync' if ours else 'all-to-all'}: loss {train(dist.new_group(), ours)[-1]:.9f}")
