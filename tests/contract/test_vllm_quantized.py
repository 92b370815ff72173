"""A real vLLM whose weights are quantized: every tensor that its reload fills has to come."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from tests.models import build_tiny_qwen3, pack_int4
from tests.quantised import CONFIGS, check_declared, same_bits, save_quantised, weights
from tests.vllm_imports import vllm_before
from weightsync.engines.loading.checkpoint import checkpoint_of
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.engines.quantised.quantizing_loader import QuantizingLoader, formats_of
from weightsync.engines.quantised.stored_checkpoint import quantization_of, require_stored
from weightsync.engines.vllm.api import (
    loaded_layers,
    model_folder,
    packed_layers,
    set_environment,
    start,
    stop,
)
from weightsync.engines.vllm.reload import LayerwiseReload
from weightsync.errors import ConfigError
from weightsync.memory.tensors import named_tensors
from weightsync.plan.layout.formats import Format
from weightsync.protocol.messages import LiveDigest
from weightsync.quantising.quantize import quantize

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

needs_kernel = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2", reason="vLLM's kernel for four bits needs AVX-512"
)


class Layer(nn.Module):
    """A quantized layer; `Model` finds its parameters by name, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.zeros(4, 1), requires_grad=False)
        self.register_buffer("cache", torch.arange(3), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = Layer()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, taken = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", torch.Tensor.copy_)(parameter, weight)
            taken.add(name)
        return taken


TENSORS = {"proj.weight": torch.ones(4, 3, dtype=torch.int8), "proj.weight_scale": torch.full((4, 1), 0.5)}


def reload_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    reload = LayerwiseReload(
        model, SimpleNamespace(dtype=torch.bfloat16, quantization="compressed-tensors"), torch.device("cpu")
    )
    try:
        reload.load(tensors.items())
        reload.finish()
    except RuntimeError:
        reload.abandon()
        raise


def test_a_scale_that_does_not_come_is_named_and_the_next_update_heals() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    without = {"proj.weight": TENSORS["proj.weight"]}
    with pytest.raises(RuntimeError, match=r"left out proj\.weight_scale: 1 "):
        reload_model(model, without)
    for _ in range(2):
        reload_model(model, TENSORS)
        assert torch.equal(model.proj.weight_scale, TENSORS["proj.weight_scale"])
    with pytest.raises(RuntimeError, match=r"left out proj\.weight_scale \(4, 1\): 1 "):
        reload_model(model, without)
    reload_model(model, TENSORS)
    with pytest.raises(RuntimeError, match=r"left out proj\.weight \(4, 3\), what was given other names"):
        reload_model(model, TENSORS | {"proj.weight": torch.ones(4, 3)})
    reload_model(model, TENSORS)


STORED = Format(rule="compressed-tensors", values="int8", block=(1, 0))


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (None, "not quantised"),
        (Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)), "float8_e4m3fn with a scale"),
        (Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True), "int4 with a scale"),
        (
            Format(rule="gptq", values="int8", block=(1, 0), packed=True),
            "int8 (GPTQ) with a scale",
        ),
    ],
)
def test_a_layer_that_is_stored_otherwise_is_named_when_connecting(form: Format | None, given: str) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    layers = "vLLM", loaded_layers(model), packed_layers(model)
    require_stored(*layers, ["proj.weight", "unknown.weight"], {"proj.weight": STORED})
    with pytest.raises(ConfigError) as raised:
        require_stored(*layers, ["proj.weight"], {"proj.weight": form} if form else {})
    assert raised.value.field == "quantization_config of proj.weight"
    assert given in str(raised.value.value)
    assert "vLLM's layer has weight (int8), weight_scale (float32)" in raised.value.remedy
    named = form is not None and form.rule == "gptq"
    assert ("modules_in_block_to_quantize" in raised.value.remedy) == named


class Served:
    """vLLM in this process, and its model."""

    def __init__(self, folder: Path, load_format: str, **options: Any) -> None:
        set_environment()
        from vllm import EngineArgs, SamplingParams

        self.engine = start(
            EngineArgs(
                str(folder),
                load_format=load_format,
                skip_tokenizer_init=True,
                **{"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True} | options,
            )
        )
        self._params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        core: Any = self.engine.engine_core
        self.runner = core.engine_core.model_executor.driver_worker.worker.model_runner

    def says(self) -> list[int]:
        self.engine.reset_prefix_cache()
        self.engine.add_request("0", {"prompt_token_ids": [5, 6, 7]}, self._params)
        said: list[int] = []
        while self.engine.has_unfinished_requests():
            for done in self.engine.step():
                said = list(done.outputs[0].token_ids)
        return said

    def live(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters that the kernels read."""
        parameters = self.runner.get_model().named_parameters()
        return {name: parameter.detach().clone() for name, parameter in parameters}

    def digest(self) -> LiveDigest:
        return LiveParameters(self.runner.get_model(), torch.device("cpu")).digest()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        reload_model(self.runner.get_model(), tensors)

    def close(self) -> None:
        stop(self.engine)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    build_tiny_qwen3(tmp_path)
    return tmp_path, pack_int4(tmp_path)


@pytest.fixture
def from_disk(checkpoint) -> list[int]:
    served = Served(checkpoint[0], "auto")
    said = served.says()
    served.close()
    return said


@pytest.fixture
def dummy(checkpoint, from_disk) -> Iterator[Served]:
    served = Served(checkpoint[0], "dummy")
    yield served
    served.close()


@needs_kernel
@pytest.mark.faults
@pytest.mark.timeout(400)
def test_each_tensor_of_a_quantized_checkpoint_has_to_come(
    checkpoint, from_disk: list[int], dummy: Served, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = checkpoint[1]
    assert dummy.says() != from_disk
    for again in (False, True):
        # Once the checkpoint has filled the model, the tensors themselves are compared with it.
        for without, first, later in (
            (
                "layers.0.mlp.down_proj.weight_scale",
                r"layers\.0\.mlp\.down_proj\.weight_scale: 1 ",
                r"layers\.0\.mlp\.down_proj\.weight_scale \(64, 4\): 1 ",
            ),
            (
                "layers.1.self_attn.k_proj.weight_packed",
                r"qkv_proj\.weight_packed \(1536 of 2048 elements came\)",
                r"k_proj\.weight_packed \(64, 8\): 1 ",
            ),
        ):
            if again:
                dummy.load(tensors)
            with pytest.raises(RuntimeError, match=f"vLLM's loader left out .*{later if again else first}"):
                dummy.load({name: value for name, value in tensors.items() if without not in name})
        dummy.load(tensors)
        assert dummy.says() == from_disk
    assert "Failed to load weights" not in caplog.text


@pytest.mark.parametrize("powers_of_two", [False, True])
@given(weight=weights())
def test_fp8_blocks_are_vllms(powers_of_two: bool, weight: torch.Tensor) -> None:
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    form = Format(rule="fp8", values="float8_e4m3fn", block=(4, 8), powers_of_two=powers_of_two)
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    with torch.compiler.set_stance("force_eager"):  # compiling for each dtype takes half a minute
        values, scales = deep_gemm.per_block_cast_to_fp8(weight, [4, 8], powers_of_two)
    assert same_bits(found["weight"], values)
    assert same_bits(found["weight_scale_inv"], scales)


def _is_ignored(name: str) -> bool:
    """Return whether it is a scale of a cache that is not quantised.

    A vLLM before 0.32 that starts with dummy weights draws these scales.
    """
    return vllm_before("0.32") and name.endswith(("attn._k_scale", "attn._q_scale", "attn._v_scale"))


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_live_byte_is_that_of_an_engine_which_loaded_the_quantised_checkpoint(
    name: str, tmp_path: Path
) -> None:
    if name == "gptq" and vllm_before("0.31"):
        pytest.skip("this vLLM's layers on CPUs are done before the last g_idx comes, and fail")
    wanted, digests, weights = [], [], []
    for seed in range(2):
        source, packed = tmp_path / str(seed), tmp_path / f"{seed}-int4"
        model = build_tiny_qwen3(source, seed=seed)
        save_quantised(source, packed, CONFIGS[name])
        served = Served(packed, "auto")
        wanted.append(served.live())
        digests.append(served.digest())
        served.close()
        weights.append({name: tensor.bfloat16() for name, tensor in named_tensors(model)[0].items()})
    fed = Served(tmp_path / "0-int4", "dummy")
    checkpoint = checkpoint_of(model_folder(fed.runner.model_config), torch.bfloat16)
    formats = formats_of(checkpoint, quantization_of(fed.runner.model_config.hf_config))
    try:
        for number in (0, 1, 0):
            reload = LayerwiseReload(fed.runner.get_model(), fed.runner.model_config, torch.device("cpu"))
            loader = QuantizingLoader(reload, formats)
            loader.load(weights[number].items())
            loader.finish()
            live = fed.live()
            assert live.keys() == wanted[number].keys()
            differing = [name for name in live if not same_bits(live[name], wanted[number][name])]
            assert [name for name in differing if not _is_ignored(name)] == []
            assert fed.digest() == digests[number]
        packed_names = [name for name in live if name.endswith(("weight_packed", "qweight"))]
        assert packed_names
        assert not any(same_bits(wanted[0][name], wanted[1][name]) for name in packed_names)
        assert digests[0].kind == digests[1].kind
        assert digests[0].digest != digests[1].digest
    finally:
        fed.close()
