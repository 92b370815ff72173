"""What of a PEFT model is published as an adapter, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightsync.actors.trainer_shard import AdapterShard, TrainerShard
from weightsync.errors import ConfigError, StateError
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, Plan, RankLayout, Segment, make_plan
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.messages import PublishTask, combine
from weightsync.sources.lora.lora import LoraSource

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = [
    f"layers.{layer}.{module}.lora_{kind}.weight"
    for layer in range(2)
    for module in ("up_proj", "down_proj")
    for kind in "AB"
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 10)
        self.down_proj = nn.Linear(10, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))


def adapted(**settings: Any) -> nn.Module:
    config = {"r": 3, "lora_alpha": 6, "target_modules": ["up_proj", "down_proj"], **settings}
    model: nn.Module = peft.get_peft_model(Model(), peft.LoraConfig(**config))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    return model


def published(source: LoraSource, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Publish as the driver has it done, and return what travels."""
    layout = source.layout()
    assert layout.device == ""
    plan = plan_of(layout, dtype=dtype)
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    try:
        source.attach(plan, 0, buffer.handle)
        source.publish(True)
        found = {}
        for piece in plan.trainer_pieces(0):
            data = buffer.tensor[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes].clone()
            meta = plan.tensors[piece.tensor]
            found[meta.name] = data.view(getattr(torch, meta.dtype)).view(piece.box.extent)
        return found
    finally:
        source.close()
        buffer.close()


def plan_of(*layouts: RankLayout, dtype: str) -> Plan:
    wanted = tuple(type(meta)(meta.name, dtype, meta.shape) for meta in layouts[0].tensors)
    engine = Layout.from_ranks([RankLayout(wanted, tuple(map(Segment.whole, wanted)))])
    members = Members(num_holders=2, trainers=(0,) * len(layouts), engines=(("e", (1,)),))
    sides = Layout.from_ranks(layouts), {"e": engine}
    return make_plan(*sides, members, bucket_bytes=1 << 20, max_staging_bytes=4 << 20)


def attached(model: nn.Module) -> tuple[LoraSource, Plan, SharedBuffer]:
    """Return a source that publishes to a buffer. Both have to be closed."""
    source = LoraSource(model, "default")
    plan = plan_of(source.layout(), dtype="float32")
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, buffer.handle)
    return source, plan, buffer


@pytest.mark.parametrize(("settings", "scaling"), [({}, 2.0), ({"use_rslora": True}, 6 / 3**0.5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_and_b_times_the_scaling_travel(settings: dict[str, Any], scaling: float, dtype: str) -> None:
    model = adapted(**settings)
    found = published(LoraSource(model, "default"), dtype)
    assert sorted(found) == sorted(NAMES)
    live = dict(model.named_parameters())
    for name, value in found.items():
        path = f"base_model.model.{name.removesuffix('.weight')}.default.weight"
        wanted = live[path] * scaling if ".lora_B" in name else live[path]
        assert torch.equal(value, wanted.to(value.dtype))


def test_bfloat16_is_multiplied_with_the_whole_scaling_and_rounded_once() -> None:
    model = adapted(lora_alpha=4).to(torch.bfloat16)
    found = published(LoraSource(model, "default"), "bfloat16")
    live = dict(model.named_parameters())
    for name in (each for each in NAMES if ".lora_B" in each):
        b = live[f"base_model.model.{name.removesuffix('.weight')}.default.weight"]
        assert torch.equal(found[name], (b.float() * (4 / 3)).bfloat16())


def test_each_version_is_what_the_parameters_are_then() -> None:
    model = adapted()
    source = LoraSource(model, "default")
    first = published(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    second = published(source)
    assert all(torch.equal(second[name], first[name] + 1) for name in NAMES if ".lora_A" in name)
    assert all(torch.allclose(second[name], first[name] + 2) for name in NAMES if ".lora_B" in name)


def test_parameters_that_were_replaced_and_another_scaling_are_noticed() -> None:
    model = adapted()
    source, plan, buffer = attached(model)
    source.publish(True)
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    layer.lora_B["default"].weight = nn.Parameter(torch.ones_like(layer.lora_B["default"].weight))
    layer.scaling["default"] = 5.0
    source.publish(True)
    piece = next(each for each in plan.trainer_pieces(0) if plan.tensors[each.tensor].name == NAMES[1])
    data = buffer.tensor[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes].view(
        torch.float32
    )
    assert data.eq(5).all()
    source.close()
    buffer.close()


def test_a_cast_to_the_dtype_of_slots_rounds_once() -> None:
    model = adapted(use_rslora=True)
    source = LoraSource(model, "default")
    source.cast("bfloat16")
    assert {meta.dtype for meta in source.layout().tensors} == {"bfloat16"}
    assert {meta.dtype for meta in source.spec("math").tensors} == {"float32"}
    whole = published(LoraSource(model, "default"))
    assert all(
        torch.equal(each, whole[name].bfloat16()) for name, each in published(source, "bfloat16").items()
    )


def test_the_spec_has_the_names_of_the_base_models_checkpoint() -> None:
    wrapped = nn.Module()
    wrapped.module = adapted(rank_pattern={"down_proj": 5})
    for model in (wrapped.module, wrapped):
        spec = LoraSource(model, "default").spec("math")
        assert [meta.name for meta in spec.tensors] == NAMES
        assert (spec.name, spec.rank) == ("math", 5)
        assert spec.tensors[0].shape == (3, 6)
        assert pickle.loads(pickle.dumps(spec)) == spec == AdapterSpec.of("math", spec.tensors)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "DoRA's magnitude in base_model.model.layers.0.up_proj"),
        ({"lora_bias": True}, "lora_bias in base_model.model.layers.0.up_proj"),
        ({"modules_to_save": ["embed"]}, "modules_to_save in base_model.model.embed"),
        ({"target_modules": ["embed"]}, "an embedding's LoRA in base_model.model.embed"),
        ({"bias": "all"}, "bias='all' in its configuration"),
        ({"bias": "lora_only"}, "bias='lora_only' in its configuration"),
        ({"trainable_token_indices": {"embed": [1]}}, "trainable tokens in base_model.model.embed"),
    ],
)
def test_what_is_more_than_a_and_b_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LoraSource(adapted(**settings), "default").spec("math")


@pytest.mark.parametrize("initialisation", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_whose_base_peft_changed_is_refused_with_the_remedy(initialisation: str) -> None:
    model: Any = adapted(init_lora_weights=initialisation)
    says = f"init_lora_weights: '{initialisation}' is not valid; it changed the base of adapter default"
    with pytest.raises(ConfigError, match=says):
        LoraSource(model, "default").spec("math")
    model.add_adapter("second", peft.LoraConfig(target_modules=["up_proj"]))
    with pytest.raises(ConfigError, match=says):
        LoraSource(model, "second").spec("math")
    model.peft_config["default"].init_lora_weights = True  # as the engine's checkpoint has the changed base
    assert LoraSource(model, "default").spec("math").tensors


@pytest.mark.parametrize("initialisation", [True, False, "gaussian", "orthogonal"])
def test_initialisations_that_leave_the_base_as_it_is_are_taken(initialisation: object) -> None:
    base = Model()
    before = base.layers[0].up_proj.weight.clone()
    config = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=initialisation)
    model = peft.get_peft_model(base, config)
    assert LoraSource(model, "default").spec("math").tensors
    assert torch.equal(model.get_submodule("base_model.model.layers.0.up_proj.base_layer").weight, before)


def test_what_a_variant_of_lora_computes_is_refused() -> None:
    """As PEFT's aLoRA, which acts on some tokens alone. Engines compute plain LoRA."""
    model = adapted()
    layer = next(module for module in model.modules() if hasattr(module, "lora_variant"))
    layer.lora_variant["default"] = Block()
    with pytest.raises(ConfigError, match=r"Block \(a variant of LoRA\) in .*layers.0.up_proj"):
        LoraSource(model, "default").spec("math")


def test_wrappers_of_layers_leave_no_trace_in_names() -> None:
    model = adapted()
    layers = model.get_submodule("base_model.model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1])
    assert sorted(published(LoraSource(model, "default"))) == sorted(NAMES)


def test_an_adapter_with_other_modules_can_be_laid_out_again() -> None:
    source = LoraSource(adapted(), "default")
    source.layout()
    source.replace(adapted(target_modules=["up_proj"]))
    assert sorted(published(source)) == [name for name in sorted(NAMES) if "up_proj" in name]


def test_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter: 'defalt' is not valid; did you mean 'default'"):
        LoraSource(adapted(), "defalt").spec("math")
    with pytest.raises(ConfigError, match="adapter: 'default' is not valid; the model has none"):
        LoraSource(Model(), "default").spec("math")
    with pytest.raises(ConfigError, match=r"self.model: 'list' .* a module that PEFT made"):
        LoraSource([adapted()], "default")
    with pytest.raises(StateError, match=r"TrainerShard has to set self.model"):
        TrainerShard().sync_open_adapter("math", "default")


def test_an_adapter_that_changed_its_shape_has_to_be_registered_again() -> None:
    model = adapted()
    source, _, buffer = attached(model)
    source.replace(adapted(r=4))
    with pytest.raises(StateError, match=r"up_proj.lora_A.weight of adapter default was \(3, 6\) before"):
        source.publish(True)
    source.replace(adapted(target_modules=["up_proj"]))
    with pytest.raises(StateError, match=r"layers.0.down_proj.lora_A.weight of adapter default is gone"):
        source.publish(True)
    source.close()
    buffer.close()


def test_a_shard_publishes_the_model_that_its_trainer_has_now_whoever_calls_it() -> None:
    """A control channel calls it without the trainer's own methods between."""
    trainer = TrainerShard()
    trainer.model = adapted()
    shard = AdapterShard(trainer, "default")
    plan = plan_of(shard.sync_layout().rank_layout(), dtype="float32")
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    shard.sync_attach(plan, 0, buffer.handle)
    first = shard.sync_publish(PublishTask(count=True)).fingerprint
    trainer.model = adapted()
    with torch.no_grad():
        next(each for name, each in trainer.model.named_parameters() if ".lora_A" in name).zero_()
    assert (shard.sync_publish(PublishTask(count=True)).fingerprint != first).any()
    shard.adapter.close()
    buffer.close()


def test_ranks_of_one_adapter_that_differ_do_not_agree() -> None:
    trainers = [TrainerShard(), TrainerShard()]
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.model = adapted()
    shards = [AdapterShard(trainer, "default") for trainer in trainers]
    plan = plan_of(*(shard.sync_layout().rank_layout() for shard in shards), dtype="float32")
    assert plan.replicas
    task = PublishTask(count=True, rounds=tuple(range(plan.replicas.num_rounds)))
    buffers = [SharedBuffer.create(plan.send_buffer_nbytes(rank)) for rank in range(2)]
    for rank, (shard, buffer) in enumerate(zip(shards, buffers, strict=True)):
        shard.sync_attach(plan, rank, buffer.handle)

    def differ() -> bool:
        said = [shard.sync_publish(task).agreement for shard in shards]
        return bool(combine([each for each in said if each is not None]).any())

    assert not differ()
    with torch.no_grad():
        next(each for name, each in trainers[1].model.named_parameters() if ".lora_B" in name)[0, 0] += 1
    assert differ()
    for shard, buffer in zip(shards, buffers, strict=True):
        shard.adapter.close()
        buffer.close()
