"""The experts that vLLM's load balancer (EPLB) has in each slot.

vLLM's loader writes each expert to the slots in which vLLM starts with it, and does not know that experts
moved. So an engine with EPLB is only updated if its parameters can be written in place.

Source: vLLM's ``distributed/eplb/eplb_state.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.engines.loading.arranged_experts import ExpertSlot, arranged
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.vllm.api import ModelRunner, expert_rank, require_moves_between_steps
from weightsync.errors import ConfigError
from weightsync.faults import inject
from weightsync.plan import RankLayout
from weightsync.plan.layout.arrangement import Experts, arrangement_key


def loads_whole(why: str) -> ConfigError:
    """Return the refusal of an engine that moves experts and loads whole tensors, for the reason `why`."""
    remedy = f"leave it out: {why}, so vLLM's loader writes them, which does not follow experts that moved"
    return ConfigError("options.enable_eplb", True, remedy)


class BalancedExperts:
    """The experts of one rank of an engine."""

    def __init__(self, runner: ModelRunner) -> None:
        """Raises ConfigError if vLLM moves experts in the background."""
        self._runner = runner
        require_moves_between_steps(runner.vllm_config.parallel_config.eplb_config.use_async)

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks, by layer."""
        rows: Experts = self._state().physical_to_logical_map.tolist()
        return rows

    def arranged(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> RankLayout:
        """Return the layout that vLLM's loader has, for the experts that are in the slots now.

        `live` has the layout's buffers. Raises UnprovableError as `arranged_experts.arranged`.
        """
        names, slots = {each.data_ptr(): name for name, each in live.items()}, dict[str, list[ExpertSlot]]()
        model, experts = self._state().model, self.experts()
        for row, weights in zip(experts, model.expert_weights, strict=True):
            for weight in weights:
                if (name := names.get(weight.data_ptr())) is None:
                    raise UnprovableError("EPLB moves a tensor that updates do not write")
                slots[name] = _slots(row, expert_rank(), len(weight))
        return arranged(layout, arrangement_key(experts), slots, model.num_logical_experts)

    def move(self, experts: Experts) -> None:
        """Have vLLM copy experts between ranks, all ranks at the same time. Raises RuntimeError."""
        state = self._runner.eplb_state
        before, state.policy = state.policy, _Given(experts)
        try:
            with torch.inference_mode():  # as vLLM's steps
                state.rearrange()
        finally:
            state.policy = before
        if arrangement_key(self.experts()) != arrangement_key(experts):
            raise RuntimeError("vLLM has other experts in its slots than it was told to")

    def _state(self) -> Any:  # noqa: ANN401 - vLLM's EplbModelState
        """Return vLLM's state of the model that updates write."""
        modules = {id(each) for each in self._runner.get_model().modules()}
        states = self._runner.eplb_state.model_states.values() if self._runner.eplb_state else ()
        found = [each for each in states if id(each.model) in modules]
        if len(found) != 1 or len(states) != 1:
            remedy = "leave it out: vLLM balances the experts of no model, or of several"
            raise ConfigError("options.enable_eplb", True, remedy)
        return found[0]


class _Given:
    """A policy of vLLM's load balancer: experts go where they are told to."""

    def __init__(self, experts: Experts) -> None:
        self._experts = torch.tensor([[*row] for row in experts])

    def rebalance_experts(self, *_: object) -> torch.Tensor:
        inject("move")
        return self._experts


def _slots(row: Sequence[int], rank: int, num_local: int) -> list[ExpertSlot]:
    """Return a rank's slots of a layer. `row` has the expert in each slot of all ranks."""
    counts, before, slots = Counter(row), Counter[int](), list[ExpertSlot]()
    for expert in row:
        slots.append(ExpertSlot(expert, before[expert], counts[expert]))
        before[expert] += 1
    return slots[rank * num_local : (rank + 1) * num_local]
