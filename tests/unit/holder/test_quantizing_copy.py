"""Ranks read and quantise just their parts, which add up to all that trainers have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernel_doubles import SharedScaleTable, Stream, use_doubles
from tests.quantised_reads_rig import ReadsRig
from weightsync.holder.quantizing_copy import sources_on
from weightsync.plan import Layout, RankLayout, Reshard, Segment, TensorMeta
from weightsync.plan.direct import stored_reads
from weightsync.plan.direct.whole_sources import WholeSource
from weightsync.plan.layout.formats import Format
from weightsync.protocol.handles import DeviceHandle
from weightsync.quantising import quantizing_reads

FORMATS = (
    Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0)),
)


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("num_trainers", "near"), [(3, False), (3, True), (1, True)])
@pytest.mark.parametrize(
    ("group_nbytes", "most_numel", "num_groups"), [(1 << 27, 1 << 25, 2), (1 << 16, 1 << 14, 9)]
)
def test_each_rank_gets_its_part_quantised_and_digests_add_up(
    monkeypatch: pytest.MonkeyPatch,
    form: Format,
    num_trainers: int,
    near: bool,
    group_nbytes: int,
    most_numel: int,
    num_groups: int,
) -> None:
    monkeypatch.setattr(quantizing_reads, "GROUP_NBYTES", group_nbytes)
    monkeypatch.setattr(stored_reads, "MOST_NUMEL", most_numel)
    rig = ReadsRig(form, "cpu", lambda memory: memory, num_trainers, near)
    if num_trainers == 1:
        assert min(rig.num_in_place) > 5, "rows of one trainer are not gathered"
    if not near:
        assert min(rig.num_groups) >= num_groups
    for seed in (1, 2):
        rig.update(seed, Stream())  # type: ignore[arg-type]


def test_digests_of_what_changed_between_two_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ReadsRig(FORMATS[1], "cpu", lambda memory: memory, num_trainers=1, near=True)
    rig.update(1, Stream())  # type: ignore[arg-type]
    monkeypatch.setattr(SharedScaleTable, "changed", lambda _: [0])
    with pytest.raises(AssertionError):
        rig.update(2, Stream())  # type: ignore[arg-type]


def test_what_lies_together_on_the_same_device_is_not_gathered() -> None:
    memory = {
        (0, "near"): DeviceHandle("cuda:a", 1, b"near", 32, 256),
        (0, "odd"): DeviceHandle("cuda:a", 1, b"near", 8, 256),
        (1, "far"): DeviceHandle("cuda:b", 2, b"far", 0, 256),
    }
    weights = [TensorMeta(name, "bfloat16", (8, 8)) for _, name in memory]
    sources = [
        RankLayout(
            tuple(weights), tuple(Segment.whole(each) for each in weights if (rank, each.name) in memory)
        )
        for rank in range(2)
    ]
    needs = RankLayout(
        tuple(weights),
        tuple(replace(Segment.whole(each), buffer=f"read {n}") for n, each in enumerate(weights)),
    )
    reshard = Reshard(Layout.from_ranks(sources), "e", Layout.from_ranks([needs]))
    found = sources_on("cuda:a", [reshard.reads(0, [0, 1])], memory)
    assert found == {"read 0": WholeSource(0, "near", 0)}
