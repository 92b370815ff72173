"""Where adapters wrap a vLLM's layers, its base weights are found under the wrapped layers' names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.conftest import Rig
from tests.patience import patient
from weightsync.engines.loader_trace import trace
from weightsync.engines.vllm.api import loader_names, require_updatable
from weightsync.errors import ConfigError
from weightsync.memory.tensors import named_tensors, segment_view
from weightsync.plan import TensorMeta

Weights = Iterable[tuple[str, torch.Tensor]]

HIDDEN = 6
CHECKPOINT = {
    "embed_tokens.weight": (10, HIDDEN),
    "attn.q_proj.weight": (8, HIDDEN),
    "attn.k_proj.weight": (4, HIDDEN),
    "attn.v_proj.weight": (4, HIDDEN),
    "attn.q_proj.bias": (8,),
    "attn.k_proj.bias": (4,),
    "attn.v_proj.bias": (4,),
    "attn.o_proj.weight": (HIDDEN, 8),
    "norm.weight": (HIDDEN,),
}
QKV = {"q_proj": (0, 8), "k_proj": (8, 4), "v_proj": (12, 4)}


class Layer(nn.Module):
    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0]), requires_grad=False)


class LayerWithLoRA(nn.Module):
    """As of vLLM 0.24; its slots are no parameters."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(2, 1, 4, HIDDEN),)


class FusedMoEWithLoRA(LayerWithLoRA): ...


class Model(nn.Module):
    """Finds parameters by name, as vLLM's models do."""

    packed_modules_mapping = {"qkv_proj": list(QKV)}  # noqa: RUF012 - as vLLM has it

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = LayerWithLoRA(Layer(10, HIDDEN))
        self.attn = nn.Module()
        self.attn.qkv_proj = LayerWithLoRA(Layer(16, HIDDEN, bias=True))
        self.attn.o_proj = LayerWithLoRA(Layer(HIDDEN, 8))
        self.norm = Layer(HIDDEN)

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            part = next((part for part in QKV if part in name), None)
            if part:
                target = parameters[name.replace(part, "qkv_proj")].data.narrow(0, *QKV[part])
            else:
                target = parameters[name].data
            target.copy_(weight)


def test_wrapped_layers_are_written_live_under_their_own_names() -> None:
    model = Model()
    known_as = loader_names(model)
    metas = [TensorMeta(name, "float32", shape) for name, shape in CHECKPOINT.items()]
    traced = trace(
        model, metas, (), load=lambda weights: model.load_weights((known_as(n), t) for n, t in weights)
    )
    assert set(traced.live) == {
        "embed_tokens.base_layer.weight",
        "attn.qkv_proj.base_layer.weight",
        "attn.qkv_proj.base_layer.bias",
        "attn.o_proj.base_layer.weight",
        "norm.weight",
    }
    assert {segment.tensor for segment in traced.layout.segments} == set(CHECKPOINT)


def test_names_of_a_model_without_adapters_stay() -> None:
    model = nn.Sequential(Layer(2, 2))
    assert loader_names(model)("0.weight") == "0.weight"


def test_adapters_of_experts_are_refused() -> None:
    class Config:
        speculative_config = None

    model = nn.Sequential(FusedMoEWithLoRA(Layer(2, 2)))
    with pytest.raises(ConfigError, match=r"enable_lora: True .*adapters of experts.* kernels of 0"):
        require_updatable(Config(), model)


@pytest.fixture
def rig(tmp_path: Path):
    pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("vLLM runs on the GPU here")
    rig = Rig("vllm", False, "host", tmp_path, enable_lora=True, max_lora_rank=8, max_loras=2)
    yield rig
    rig.close()


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_real_vllm_with_adapters_serves_what_was_sent(rig: Rig) -> None:
    prompts = [[5, 6, 7], [200, 3, 90, 41]]
    for version, model in enumerate(rig.models, start=1):
        rig.update(model, version)
        assert rig.serves(model, prompts, rig.generate(prompts).result(patient(120)).tokens)
    rig.engine.call(lambda llm: assert_live(llm, rig.models[0]))


def assert_live(llm, model) -> None:
    """As on a GPU, where parameters are plain: the traced layout puts each byte where the loader does.

    On a CPU they are packed, so the layers get those again that vLLM loads into.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta

    served = llm.model_executor.driver_worker.worker.model_runner.get_model()
    for module in served.modules():
        info = get_layerwise_info(module)
        restore_layer_on_meta(module, info)
        materialize_layer(module, info)
        for parameter in module.parameters(recurse=False):
            parameter.weight_loader = _get_original_loader(parameter)
    served.lm_head.weight = served.model.embed_tokens.base_layer.weight
    tensors, tied = named_tensors(model)
    metas = [TensorMeta(name, "float32", tuple(each.shape)) for name, each in tensors.items()]
    known_as = loader_names(served)

    def load(weights: Weights) -> None:
        served.load_weights((known_as(name), tensor.detach()) for name, tensor in weights)

    traced = trace(served, metas, tied, load=load)
    assert "model.layers.0.self_attn.qkv_proj.base_layer.weight" in traced.live
    assert not any("lora" in name for name in traced.live)
    load(tensors.items())
    wanted = {name: each.clone() for name, each in traced.live.items()}
    for each in traced.live.values():
        each.data.zero_()
    for segment in traced.layout.segments:
        part = tensors[segment.tensor].detach()[segment.box.slices()]
        segment_view(traced.live[segment.buffer], segment).copy_(part)
    for name, each in traced.live.items():
        np.testing.assert_array_equal(each.detach().numpy(), wanted[name].detach().numpy(), err_msg=name)
