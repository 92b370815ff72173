"""A source of Megatron's models from one version to the next, on stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.source_ranks import plan_for
from tests.megatron_standin import model_of
from weightsync import TrainerShard
from weightsync.errors import ConfigError, PlanError, StateError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Plan
from weightsync.sources import make_source
from weightsync.sources.megatron import MegatronSource

FC1, FC2, TABLE = (
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "embedding.word_embeddings.weight",
)
VOCAB = 11


def made(seed: int = 0, **settings: Any) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    shapes = {TABLE: (16, 8), FC1: (6, 8), FC2: (8, 3)}
    return model_of({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, **settings)


class Attached:
    """A source and its send buffer."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.source = MegatronSource(model, family="llama", vocab_size=VOCAB, **settings)
        self.plan: Plan = plan_for([self.source.layout()])
        self.buffer = SharedBuffer.create(self.plan.send_buffer_nbytes(0))
        self.source.attach(self.plan, 0, self.buffer.handle)

    def check(self, model: nn.Module) -> None:
        """Publish, and check that it is what `model` holds."""
        digests = self.source.publish(True).digests
        wanted = {
            "model.embed_tokens.weight": model.get_parameter(TABLE)[:VOCAB],
            "model.layers.0.mlp.gate_proj.weight": model.get_parameter(FC1)[:3],
            "model.layers.0.mlp.up_proj.weight": model.get_parameter(FC1)[3:],
            "model.layers.0.mlp.down_proj.weight": model.get_parameter(FC2),
        }
        assert {meta.name for meta in self.plan.tensors} == {*wanted}
        for number, meta in enumerate(self.plan.tensors):
            tensor = wanted[meta.name].detach()
            assert digests[number] == tensor_digest(tensor, meta.shape), meta.name
            for piece in self.plan.trainer_pieces(0):
                if piece.tensor == number:
                    start = piece.send_buffer_offset
                    sent = self.buffer.tensor[start : start + piece.nbytes].view(torch.float32)
                    assert torch.equal(sent.view(piece.box.extent), tensor[piece.box.slices()])

    def close(self) -> None:
        self.source.close()
        self.buffer.close()


def test_changed_weights_are_published_also_from_other_memory() -> None:
    model = made()
    attached = Attached(model)
    attached.check(model)
    with torch.no_grad():
        model.get_parameter(FC1).add_(1)
    attached.check(model)
    model.get_parameter(FC1).data = torch.randn(6, 8)
    attached.check(model)
    attached.close()


def test_another_model_takes_the_place_of_the_first() -> None:
    attached, other = Attached([made()]), made(1)
    attached.source.replace([other])
    attached.check(other)
    attached.close()


def test_a_layer_of_another_number_has_to_connect_again() -> None:
    attached = Attached(made())
    attached.source.replace(made(first_layer=1))
    with pytest.raises(StateError, match=r"model\.layers\.0\.mlp.* is gone: connect\(\) again"):
        attached.source.publish(True)
    attached.close()


def test_weights_can_be_offloaded() -> None:
    model = made()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    attached = Attached(model, offloads=True)
    attached.source.offload()
    assert {tensor.untyped_storage().nbytes() for tensor in model.parameters()} == {0}
    attached.source.publish(True)
    attached.source.onload()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name])
    attached.check(model)
    attached.close()


def test_memory_that_others_took_away_is_an_error() -> None:
    model = made()
    attached = Attached(model)
    model.get_parameter(FC2).untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"linear_fc2\.weight: it has no memory"):
        attached.source.publish(True)
    attached.close()


def test_a_checkpoints_configuration_gives_family_and_vocabulary() -> None:
    config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    layout = MegatronSource(made(), hf_config=config).layout()
    assert layout == MegatronSource(made(), family="llama", vocab_size=VOCAB).layout()


def test_without_a_family_the_error_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"family: None .*self\.hf_config.*self\.source = MegatronSource\("):
        MegatronSource(made())


@pytest.mark.parametrize("chunks", [1, 2])
def test_megatrons_models_have_this_source(chunks: int) -> None:
    module_class = type("MegatronModule", (nn.Module,), {"__module__": "megatron.core.transformer.module"})
    model = module_class() if chunks == 1 else [module_class() for _ in range(chunks)]
    with pytest.raises(ConfigError, match=r"set self\.hf_config"):
        make_source(model)
    config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    assert type(make_source(model, hf_config=config)) is MegatronSource


def test_a_shard_passes_the_configuration_on() -> None:
    shard = TrainerShard()
    module_class = type("MegatronModule", (type(made()),), {"__module__": "megatron.core.transformer.module"})
    shard.model = made()
    shard.model.__class__ = module_class
    shard.hf_config = SimpleNamespace(model_type="llama", vocab_size=VOCAB)
    assert (
        shard.sync_layout().rank_layout() == MegatronSource(made(), family="llama", vocab_size=VOCAB).layout()
    )
