"""An adapter that ZeRO-3 partitions, on stand-ins: real engines are in tests/contract."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.source_ranks import plan_for
from tests.unit.sources.test_lora import adapted, published
from tests.unit.sources.test_stacked_lora import stacked
from weightsync.errors import ConfigError, StateError
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.sources.lora.lora import LoraSource

pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def partition(model: nn.Module, rank: int, num_ranks: int) -> nn.Module:
    """Cut all parameters as ZeRO-3 does. What pads a partition is no number."""
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        flat, parameter.ds_shape = parameter.data.flatten(), tuple(parameter.shape)
        size = -(-len(flat) // num_ranks)
        run = flat[size * rank : size * (rank + 1)]
        set_part(parameter, torch.cat([run, torch.full((size - len(run),), torch.nan)]))
        parameter.ds_numel, parameter.ds_zero_partition_rank = len(flat), rank
        parameter.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
        parameter.data = torch.empty(0)
    return model


def set_part(parameter: Any, part: Any) -> None:
    part.ds_numel, part.final_location = len(part), None
    parameter.ds_tensor = part


class Ranks:
    """All ranks of an adapter, attached."""

    def __init__(self, num_ranks: int) -> None:
        self.models = [partition(adapted(), rank, num_ranks) for rank in range(num_ranks)]
        self.sources = [LoraSource(model, "default") for model in self.models]
        self._plan: Plan = plan_for([source.layout() for source in self.sources])
        sizes = map(self._plan.send_buffer_nbytes, range(num_ranks))
        self._buffers = [SharedBuffer.create(size) for size in sizes]
        for rank, source in enumerate(self.sources):
            source.attach(self._plan, rank, self._buffers[rank].handle)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for source, buffer in zip(self.sources, self._buffers, strict=True):
            source.close()
            buffer.close()

    def published(self) -> dict[str, torch.Tensor]:
        """Publish on all ranks, and put together what travels."""
        found = {meta.name: torch.full(meta.shape, torch.inf) for meta in self._plan.tensors}
        for rank, source in enumerate(self.sources):
            source.publish(True)
            for piece in self._plan.trainer_pieces(rank):
                start = piece.send_buffer_offset
                data = self._buffers[rank].tensor[start : start + piece.nbytes].clone().view(torch.float32)
                found[self._plan.tensors[piece.tensor].name][piece.box.slices()] = data.view(piece.box.extent)
        return found


def first_a(model: nn.Module) -> Any:
    return next(each for name, each in model.named_parameters() if ".lora_A" in name)


NAME = "layers.0.up_proj.lora_A.weight"
"""That of `first_a`."""


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
def test_what_the_ranks_hold_is_the_adapter_once(num_ranks: int) -> None:
    """Of sixteen ranks, the last one holds nothing."""
    whole = published(LoraSource(adapted(), "default"))
    with Ranks(num_ranks) as ranks:
        found = ranks.published()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_the_spec_is_that_of_whole_parameters() -> None:
    spec = LoraSource(partition(adapted(), 1, 2), "default").spec("math")
    assert spec == LoraSource(adapted(), "default").spec("math")


def test_partitions_in_other_memory_are_noticed() -> None:
    with Ranks(2) as ranks:
        before = ranks.published()[NAME]
        for model in ranks.models:
            first_a(model).ds_tensor.data = first_a(model).ds_tensor * 2  # as offloading states does
        assert torch.equal(ranks.published()[NAME], before * 2)
        for model in ranks.models:
            set_part(first_a(model), first_a(model).ds_tensor * 2)  # as partitioning again does
        assert torch.equal(ranks.published()[NAME], before * 4)


def test_another_run_has_to_be_registered_again() -> None:
    with Ranks(2) as ranks:
        ranks.sources[0].replace(partition(adapted(), 0, 3))
        with pytest.raises(StateError, match=rf"{NAME} of adapter default was \(9,\) before, and is \(6,\)"):
            ranks.published()


def test_a_gathered_parameter_is_published_if_its_partition_is_the_same() -> None:
    with Ranks(1) as ranks:
        before = ranks.published()[NAME]
        parameter = first_a(ranks.models[0])
        parameter.data = parameter.ds_tensor.clone().view(parameter.ds_shape)
        parameter.ds_status.name = "AVAILABLE"
        assert torch.equal(ranks.published()[NAME], before)
        parameter.data[0, 0] += 1
        with pytest.raises(StateError, match=rf"trainer 0: {NAME} was changed while it was gathered"):
            ranks.published()


class Engine(nn.Module):
    """A stand-in for DeepSpeed's engine."""

    def __init__(self, module: nn.Module, num_tensor_ranks: int = 1) -> None:
        super().__init__()
        self.module, self._num_tensor_ranks = module, num_tensor_ranks

    def autotp_size(self) -> int:
        return self._num_tensor_ranks


def on_nvme() -> nn.Module:
    model = partition(adapted(), 0, 2)
    first_a(model).ds_tensor.final_location = "nvme"
    return model


def quantized() -> nn.Module:
    model = partition(adapted(), 0, 2)
    first_a(model).ds_tensor.ds_quant_scale = torch.ones(1)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (on_nvme, rf"{NAME}: offload_param.device: 'nvme'"),
        (quantized, rf"{NAME}: zero_quantized_nontrainable_weights"),
        (lambda: Engine(adapted(), 2), r"tensor_parallel.autotp_size: 2"),
        (lambda: partition(stacked()[0], 0, 2), r"target_parameters: 'experts.*' .* under ZeRO-3"),
    ],
)
def test_what_cannot_be_read_is_refused(model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LoraSource(model(), "default").spec("math")
