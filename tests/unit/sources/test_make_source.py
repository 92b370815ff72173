"""A source is found by the type of the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from weightsync import TrainerShard
from weightsync.errors import ConfigError, StateError
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, RankLayout, make_plan
from weightsync.protocol.messages import PublishTask
from weightsync.sources import SOURCES, make_source
from weightsync.sources.module import ModuleSource


class Wrapper(nn.Linear):
    """As frameworks wrap models."""


class WrapperSource(ModuleSource):
    pass


def test_a_module_of_any_class_has_a_module_source() -> None:
    assert type(make_source(Wrapper(2, 2), (), offloads=False)) is ModuleSource


def test_the_nearest_type_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, f"{__name__}.Wrapper", f"{__name__}:WrapperSource")
    assert type(make_source(Wrapper(2, 2), (), offloads=False)).__name__ == "WrapperSource"
    assert type(make_source(nn.Linear(2, 2), (), offloads=False)) is ModuleSource


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"merge": "default"}, "merge: 'Wrapper' .* plain modules, FSDP2 and DeepSpeed's engine"),
        ({"quantization": {"quant_method": "fp8"}}, "quantization: 'Wrapper' .* plain modules and FSDP2"),
    ],
)
def test_a_setting_that_the_type_does_not_know_is_refused(
    settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, f"{__name__}.Wrapper", f"{__name__}:WrapperSource")
    with pytest.raises(ConfigError, match=says):
        make_source(Wrapper(2, 2), **settings)


def test_what_no_source_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"self\.model: .*dict.*set self\.source.*valid: .*torch\.nn"):
        make_source({"weight": 1}, (), offloads=False)


def test_a_given_source_is_used_and_says_that_it_cannot_offload() -> None:
    class Fixed:
        def layout(self) -> RankLayout:
            return RankLayout((), (), device="its device")

        def close(self) -> None: ...

    shard = TrainerShard()
    shard.source = Fixed()  # type: ignore[assignment]
    assert shard.sync_layout().device == "its device"
    with pytest.raises(StateError, match="Fixed cannot offload"):
        shard.offload()
    shard.onload()


def test_a_handle_to_try_comes_from_sources_that_have_memory_to_map() -> None:
    class Exporting:
        def trial_handle(self) -> str:
            return "its handle"

        def ready(self) -> bool:
            return True

    shard = TrainerShard()
    shard.source = Exporting()  # type: ignore[assignment]
    assert shard.sync_trial_handle() == "its handle"
    shard.source = object()  # type: ignore[assignment]
    assert shard.sync_trial_handle() is None
    shard.source = ModuleSource(nn.Linear(2, 2))
    shard.sync_layout()
    assert shard.sync_trial_handle() is None, "its weights are in host memory"


def test_a_shard_without_model_and_source_says_what_to_set() -> None:
    with pytest.raises(StateError, match=r"TrainerShard has to set self\.model or self\.source"):
        TrainerShard().sync_layout()


def test_arguments_for_the_models_source_are_refused_beside_a_given_one() -> None:
    for shard, named in (
        (TrainerShard(exclude=["a"]), r"exclude: \['a'\]"),
        (TrainerShard(offloads=True), "offloads: True"),
    ):
        shard.source = ModuleSource(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=named):
            shard.sync_layout()


def test_a_source_that_takes_anothers_place_has_to_be_connected() -> None:
    shard = TrainerShard()
    shard.source = ModuleSource(nn.Linear(2, 2))
    held = shard.sync_layout().rank_layout()
    sides = Layout.from_ranks([held]), {"e": Layout.from_ranks([held])}
    plan = make_plan(*sides, Members(2, (0,), (("e", (1,)),)), bucket_bytes=256, max_staging_bytes=512)
    buffer = SharedBuffer.create(plan.send_buffer_nbytes(0))
    shard.sync_attach(plan, 0, buffer.handle)
    shard.source = ModuleSource(nn.Linear(2, 2))
    with pytest.raises(
        StateError, match=r"self\.source was replaced after connect\(\): call connect\(\) again"
    ):
        shard.sync_publish(PublishTask(count=True))


def test_a_module_that_zero_partitioned_is_refused_without_its_engine() -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_tensor = model.weight.data.view(-1)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"weight is partitioned by ZeRO-3: give the engine"):
        make_source(model).layout()
