"""What travels of a PEFT model whose adapter is merged, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.contract.source_ranks import plan_for
from tests.unit.sources.test_lora import Model, adapted, published
from tests.unit.sources.test_stacked_lora import stacked
from weightsync.errors import ConfigError, MovedError, StateError
from weightsync.sources import make_source, tensors

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """The base's tensors, with W + scaling * BA for those that are adapted."""
    found = {name: tensor.detach().clone() for name, tensor in model.get_base_model().state_dict().items()}
    wanted = {}
    for name, tensor in found.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        path = name.removesuffix(".base_layer.weight")
        a, b = (found.get(f"{path}.lora_{kind}.default.weight") for kind in "AB")
        if name.endswith(".base_layer.weight") and a is not None and b is not None:
            tensor = (tensor.float() + b.float() @ a.float() * 2.0).to(tensor.dtype)
        wanted[plain] = tensor
    return wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_travels_with_the_adapter_added_in_float32(dtype: str) -> None:
    model = adapted().to(getattr(torch, dtype))
    source = make_source(model, merge="default")
    found, wanted = published(source, dtype), expected(model)
    assert found.keys() == wanted.keys() == Model().state_dict().keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_versions_leave_no_rounding_behind() -> None:
    model = adapted().to(torch.bfloat16)
    source = make_source(model, merge="default")
    for _ in range(5):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.normal_()
        published(source, "bfloat16")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.zero_()
    found, base = published(source, "bfloat16"), expected(model)
    assert all(torch.equal(found[name], base[name]) for name in base)


def test_what_nobody_trains_is_frozen() -> None:
    model = adapted()
    weights = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("up_proj", "down_proj")}
    layout = make_source(model, merge="default").layout()
    assert set(layout.frozen) == Model().state_dict().keys() - weights
    model.get_submodule("base_model.model.embed").weight.requires_grad_(True)
    assert "embed.weight" not in make_source(model, merge="default").layout().frozen


def test_memory_that_is_read_in_place_is_named_if_a_merged_weight_gets_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = adapted()
    source = make_source(model, merge="default")
    plan = plan_for([source.layout()])
    monkeypatch.setattr(tensors, "InPlace", mock.MagicMock())
    source.attach(plan, 0, None)
    weight = model.get_parameter("base_model.model.layers.0.up_proj.base_layer.weight")
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(MovedError, match=r"layers\.0\.up_proj\.base_layer\.weight merged is in other memory"):
        source.publish(True)


def test_modules_that_the_adapter_saves_take_the_place_of_the_bases() -> None:
    model = adapted(modules_to_save=["embed"])
    wrapper = model.get_submodule("base_model.model.embed")
    copy = wrapper.get_submodule("modules_to_save.default").weight
    source = make_source(model, merge="default")
    assert "embed.weight" not in source.layout().frozen
    for _ in range(2):
        with torch.no_grad():
            copy.normal_()
        found = published(source)
        assert found.keys() == Model().state_dict().keys()
        assert torch.equal(found["embed.weight"], copy)
        wanted = expected(model)
        assert all(torch.equal(found[name], wanted[name]) for name in found if not name.startswith("embed"))


def test_wrappers_of_layers_leave_no_trace_in_names() -> None:
    model = adapted(modules_to_save=["layers.0.up_proj"])
    wanted = published(make_source(model, merge="default"))
    layers = model.get_submodule("base_model.model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1])
    found = published(make_source(model, merge="default"))
    assert found.keys() == wanted.keys() == Model().state_dict().keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def with_second(**settings: Any) -> Any:
    model: Any = adapted()
    model.add_adapter("second", peft.LoraConfig(**settings))
    return model


def test_modules_that_another_adapter_saves_are_the_bases() -> None:
    model = with_second(target_modules=["up_proj"], modules_to_save=["embed"])
    wrapper = model.get_submodule("base_model.model.embed")
    with torch.no_grad():
        wrapper.get_submodule("modules_to_save.second").weight.normal_()
    found = published(make_source(model, merge="default"))
    assert found.keys() == Model().state_dict().keys()
    assert torch.equal(found["embed.weight"], wrapper.get_submodule("original_module").weight)
    second = published(make_source(model, merge="second"))
    assert torch.equal(second["embed.weight"], wrapper.get_submodule("modules_to_save.second").weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_peft_has_merged_already_is_not_added_twice(dtype: str) -> None:
    model: Any = adapted().to(getattr(torch, dtype))
    source = make_source(model, merge="default")
    apart = published(source, dtype)
    model.merge_adapter()
    merged = published(source, dtype)
    served = model.get_base_model().state_dict()
    for name in merged:
        own = name if name in served else name.replace("_proj.", "_proj.base_layer.")
        assert torch.equal(merged[name], served[own]), name
    model.unmerge_adapter()
    again = published(source, dtype)
    near = {"rtol": 2**-6, "atol": 2**-6} if dtype == "bfloat16" else {}
    for name, value in apart.items():
        torch.testing.assert_close(merged[name], value, **near)
        torch.testing.assert_close(again[name], value, **near)


def test_another_adapter_that_peft_has_merged_is_refused_wherever_it_is() -> None:
    model: Any = adapted(target_modules=["up_proj"])
    model.add_adapter("second", peft.LoraConfig(target_modules=["down_proj"]))
    source = make_source(model, merge="default")
    published(source)
    model.merge_adapter(["second"])
    with pytest.raises(StateError, match="down_proj has adapter second merged into it: call unmerge_adapter"):
        published(source)


def tied(**settings: Any) -> Any:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 12, bias=False)
            self.head.weight = self.embed.weight

    return peft.get_peft_model(Tied(), peft.LoraConfig(**{"target_modules": ["head", "up_proj"], **settings}))


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (adapted, {"merge": "defualt"}, "adapter: 'defualt' is not valid; did you mean 'default'"),
        (Model, {"merge": "default"}, "adapter: 'default' is not valid; the model has none"),
        (lambda: adapted(use_dora=True), {"merge": "default"}, "leave DoRA's magnitude .* out"),
        (
            lambda: stacked()[0],
            {"merge": "default"},
            "leave base_model.model.experts.*, whose .*_proj it adapts, out",
        ),
        (tied, {"merge": "default"}, "leave base_model.model.head out: its weight is tied"),
        (
            lambda: tied(target_modules=["up_proj"], modules_to_save=["embed"]),
            {"merge": "default"},
            "do not save base_model.model.embed: its weight is tied",
        ),
        (
            lambda: with_second(target_modules=["layers.1.up_proj"], modules_to_save=["layers.0"]),
            {"merge": "default"},
            "leave base_model.model.layers.0.*up_proj out: PEFT saves what it is in whole",
        ),
        (adapted, {"merge": "default", "names": {"a": "b"}}, "names: .* leave it out: .* with merge"),
        (adapted, {"merge": "default", "offloads": True}, "offloads: .* with merge"),
        (adapted, {"merge": "default", "quantization": {"quant_method": "fp8"}}, "merge: .* with quantiz"),
    ],
)
def test_what_cannot_be_merged_is_refused(model: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_source(model(), **settings).layout()
