"""Where adapters wrap a vLLM's layers, its base weights are found under the wrapped layers' names."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.conftest import Rig
from tests.patience import patient
from weightsync.engines.loading.loader_trace import trace
from weightsync.engines.loading.wrapped import unwrapped
from weightsync.engines.vllm.api import require_updatable
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
CHECKPOINT_OF_LAYERS = (
    "embed_tokens.weight",
    "attn.qkv_proj.weight",
    "attn.qkv_proj.bias",
    "attn.o_proj.weight",
    "norm.weight",
)
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
    metas = [TensorMeta(name, "float32", shape) for name, shape in CHECKPOINT.items()]

    def load(weights: Weights) -> None:
        with unwrapped(model):
            model.load_weights(weights)

    traced = trace(model, metas, (), load=load)
    assert set(traced.live) == {
        "embed_tokens.base_layer.weight",
        "attn.qkv_proj.base_layer.weight",
        "attn.qkv_proj.base_layer.bias",
        "attn.o_proj.base_layer.weight",
        "norm.weight",
    }
    assert {segment.tensor for segment in traced.layout.segments} == set(CHECKPOINT)


def test_the_layers_are_back_after_a_load_that_failed() -> None:
    model = Model()
    before = {name: id(module) for name, module in model.named_modules()}
    with unwrapped(model):
        assert [name for name, _ in model.named_parameters()] == [*CHECKPOINT_OF_LAYERS]
    with pytest.raises(KeyError, match="unknown"), unwrapped(model):
        model.load_weights([("unknown", torch.zeros(1))])
    assert {name: id(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("device", "quantization", "remedy"),
    [
        ("cpu", None, "vLLM's kernel for adapters of 0 is not for CPUs"),
        ("meta", "fp8", "no update of the quantised 0 is proven"),
        ("meta", None, ""),
    ],
)
def test_experts_with_slots_are_refused_where_no_update_is_proven(
    device: str, quantization: str | None, remedy: str
) -> None:
    class Config:
        speculative_config = None
        model_config = SimpleNamespace(quantization=quantization)

    model = nn.Sequential(FusedMoEWithLoRA(Layer(2, 2))).to(device)
    with pytest.raises(ConfigError, match=remedy) if remedy else nullcontext():
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
    tensors, tied = named_tensors(model)
    if tied:
        served.lm_head.weight = served.model.embed_tokens.base_layer.weight
    metas = [TensorMeta(name, "float32", tuple(each.shape)) for name, each in tensors.items()]

    def load(weights: Weights) -> None:
        with unwrapped(served):
            served.load_weights((name, tensor.detach()) for name, tensor in weights)

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
