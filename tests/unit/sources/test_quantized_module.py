"""A module whose linear layers are quantised by the ranks that hold their rows."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.quantised import AWQ, GPTQ, INT4, int4, same_bits
from weightsync.errors import ConfigError
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, Plan, RankLayout, Segment, make_plan
from weightsync.plan.layout.formats import Quantization
from weightsync.quantising.quantize import quantize
from weightsync.sources import ModelSource, make_source
from weightsync.sources.module import ModuleSource

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8], "modules_to_not_convert": ["head"]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 64), nn.LayerNorm(64)
        self.up, self.head = nn.Linear(64, 10, bias=False), nn.Linear(64, 9)


def plan_of(layout: RankLayout) -> Plan:
    engine = RankLayout(layout.tensors, tuple(map(Segment.whole, layout.tensors)))
    return make_plan(
        Layout.from_ranks([layout]),
        {"e": Layout.from_ranks([engine])},
        Members(num_holders=2, trainers=(0,), engines=(("e", (1,)),)),
        bucket_bytes=1024,
        max_staging_bytes=2048,
        slots=2,
        epoch=1,
    )


def test_names_of_wrappers_are_taken_off_before_formats_are_chosen() -> None:
    layouts = [make_source(model, quantization=FP8).layout() for model in (Model(), torch.compile(Model()))]
    assert layouts[1].tensors == layouts[0].tensors
    assert layouts[1].tensors != ModuleSource(Model()).layout().tensors


def published(source: ModelSource) -> dict[str, torch.Tensor]:
    """Publish into a send buffer, and return what it has."""
    plan = plan_of(source.layout())
    memory = SharedBuffer.create(plan.send_buffer_nbytes(0))
    source.attach(plan, 0, memory.handle)
    source.publish(count=False)
    found: dict[str, torch.Tensor] = {}
    for piece in plan.trainer_pieces(0):
        meta = plan.tensors[piece.tensor]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        data = memory.tensor[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
        whole = found.setdefault(meta.name, torch.empty(meta.shape, dtype=dtype))
        whole[piece.box.slices()] = data.clone().view(dtype).view(piece.box.extent)
    source.close()
    memory.close()
    return found


@pytest.mark.parametrize("config", [INT4, FP8], ids=["int4", "fp8 blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_travels_is_what_a_quantised_checkpoint_stores(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    model = Model().to(dtype)
    source = make_source(model, quantization=config)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        form = Quantization.read(config).of("up.weight")
        assert form is not None
        wanted = dict(model.state_dict())
        weight = wanted.pop("up.weight").bfloat16()
        wanted |= {f"up.{suffix}": each for suffix, each in quantize(weight, form)}
        if "head.weight" not in published(source):  # INT4 leaves lm_head alone, and this is none
            head = wanted.pop("head.weight").bfloat16()
            wanted |= {f"head.{suffix}": each for suffix, each in quantize(head, form)}
        found = published(source)
        assert found.keys() == wanted.keys()
        assert [name for name, each in wanted.items() if not same_bits(found[name], each)] == []


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of 4, of which the others are not there."""
    store = resolve_name("torch.testing._internal.distributed.fake_pg:FakeStore")()  # registers the backend
    dist.init_process_group("fake", store=store, rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def sharded(rows: int, mesh: DeviceMesh, axis: int) -> Model:
    model = Model()
    model.up = nn.Linear(64, rows, bias=False)
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(axis)]))
    return model


def test_a_rank_has_its_rows_of_values_and_scales(mesh: DeviceMesh) -> None:
    layout = make_source(sharded(32, mesh, 0), quantization=FP8).layout()
    assert {meta.name: meta.shape for meta in layout.tensors if "up" in meta.name} == {
        "up.weight": (32, 64),
        "up.weight_scale_inv": (8, 8),
    }
    held = {each.tensor: (each.box.offset, each.box.extent) for each in layout.segments}
    assert held["up.weight"] == ((8, 0), (8, 64))
    assert held["up.weight_scale_inv"] == ((2, 0), (2, 8))


@pytest.mark.parametrize(("rows", "axis"), [(24, 0), (32, 1)])
def test_a_part_that_cuts_a_block_is_named(rows: int, axis: int, mesh: DeviceMesh) -> None:
    source = make_source(sharded(rows, mesh, axis), quantization=FP8)
    with pytest.raises(ConfigError, match="a rank has to hold whole blocks") as raised:
        source.layout()
    assert raised.value.field == "quantization of up.weight"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"names": {"a.": ""}}, "names"),
        ({"offloads": True}, "offloads"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_source(Model(), quantization=INT4, **arguments)
    assert raised.value.field == field


@pytest.mark.parametrize("config", [int4(symmetric=False), AWQ, GPTQ])
def test_a_format_that_engines_alone_quantise_is_named(config: dict[str, Any]) -> None:
    config = config | {"group_size": -1, "modules_in_block_to_quantize": None}
    source = make_source(Model(), quantization=config)
    with pytest.raises(ConfigError, match="quantise on the engine") as raised:
        source.layout()
    assert raised.value.field == "quantization of up.weight"
